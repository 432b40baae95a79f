"""What a run reports of itself: files, TensorBoard, histograms, diagnosis."""
