"""One HTML page of whatever was measured (`shape report`): finding results, figures of them, drawing, writing."""
