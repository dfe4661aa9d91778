"""What a trained model looks at, as one page: ``python -m bench.inspect run=outputs/latest``."""
