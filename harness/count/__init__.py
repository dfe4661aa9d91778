"""What a mechanism costs, counted: floating-point operations, bytes moved, bytes in memory."""
