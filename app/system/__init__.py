"""System layer: machine, network, files, pages, and patches of libraries."""
