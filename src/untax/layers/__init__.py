"""What sandboxes stand on: images, stages and layers, content-addressed and shared. Imports core only."""
