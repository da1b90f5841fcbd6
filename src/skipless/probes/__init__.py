"""What happens inside a model: moments, geometry of joins, attention, spectra, gradients."""
