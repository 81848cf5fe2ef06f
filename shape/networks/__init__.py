"""The networks that draft: their configuration, the SHAPE predictor with its transport, Medusa, EAGLE and block."""
