"Channels, heads, experts and layers that go"
