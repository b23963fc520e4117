"""What is counted: modules, labels, heads, experts, steps; and where paths fork among them."""
