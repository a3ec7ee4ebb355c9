"""Making drafters better: measuring them now."""
