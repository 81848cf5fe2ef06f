"""The frozen target model: loading, devices, what it supports, weights laid out for the CPU."""
