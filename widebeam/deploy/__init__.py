"""WideBeam on clusters that others run. Nothing else in the package knows of them."""
