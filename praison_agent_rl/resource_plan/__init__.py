"""What a run takes of GPUs, network, disk and time, by arithmetic from its configuration; nothing is loaded."""
