"""One layout of panels, and its two writers: W&B objects, and a page that needs no server."""
