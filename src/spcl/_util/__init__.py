"""What all packages need and nobody imports from outside."""
