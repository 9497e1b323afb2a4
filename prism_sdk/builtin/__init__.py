"""What ships in the box: registers through the same hooks as what a stranger writes, and needs no extra dependency."""
