"""What the parity tests share: runs through the real engine, described by plain values that travel to ranks."""
