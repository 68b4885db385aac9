"""The keys of a training file, by what they are about, each with its pinned default."""
