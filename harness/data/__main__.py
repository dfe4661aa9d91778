"""``python -m harness.data enwik8``: fetch a corpus ahead of time."""

import sys

from harness.data.corpora import main

sys.exit(main())
