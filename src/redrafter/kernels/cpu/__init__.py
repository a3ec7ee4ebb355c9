"""C++ for CPUs: whole passes and drafts over packed weights, and layers of models whose weights torch keeps."""
