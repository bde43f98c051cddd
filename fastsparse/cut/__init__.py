"Channels, heads, experts and layers that go, and files of cut networks"
