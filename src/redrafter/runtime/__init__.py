"""Ways to run the step: eager now; others wrap the same step."""
