"""What a step costs by hand, by other libraries and by mpjax."""
