"""What the documentation site makes by itself: pages read off the code, and formulas as MathML."""
