"""What the packages' integrations with an engine share; each imports that engine."""
