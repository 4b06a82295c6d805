//! What a backend that stands before another one hands on as it is.

/// The methods of [`Backend`](super::Backend) about the device and its streams, each passed on to `self.inner`: for the `impl` of a
/// backend that changes what memory or events do, and nothing else.
macro_rules! handed_on {
    () => {
        fn kind(&self) -> $crate::backend::BackendKind {
            self.inner.kind()
        }

        fn capabilities(&self) -> &$crate::backend::Capabilities {
            self.inner.capabilities()
        }

        fn memory(&self) -> Result<$crate::backend::MemoryInfo, $crate::error::DriverError> {
            self.inner.memory()
        }

        fn of_all_threads(&self, stream: $crate::backend::StreamId) -> $crate::backend::StreamId {
            self.inner.of_all_threads(stream)
        }

        fn retired(&self, stream: $crate::backend::StreamId) {
            self.inner.retired(stream);
        }

        fn stream_key(&self, stream: $crate::backend::StreamId) -> Result<u64, $crate::error::Error> {
            self.inner.stream_key(stream)
        }

        fn known_stream_key(&self, stream: $crate::backend::StreamId) -> Option<u64> {
            self.inner.known_stream_key(stream)
        }

        fn is_lasting(&self, stream: $crate::backend::StreamId) -> bool {
            self.inner.is_lasting(stream)
        }

        fn is_default(&self, stream: $crate::backend::StreamId) -> bool {
            self.inner.is_default(stream)
        }

        fn abroad(
            &self,
            stream: $crate::backend::StreamId,
            device: Option<u32>,
        ) -> Result<Option<$crate::backend::Abroad>, $crate::error::Error> {
            self.inner.abroad(stream, device)
        }

        fn record_abroad(
            &self,
            abroad: &$crate::backend::Abroad,
            all: bool,
        ) -> Result<$crate::backend::Event, $crate::error::DriverError> {
            self.inner.record_abroad(abroad, all)
        }

        fn recycle(&self, event: $crate::backend::Event) {
            self.inner.recycle(event);
        }

        fn is_capturing(&self, stream: $crate::backend::StreamId) -> bool {
            self.inner.is_capturing(stream)
        }

        fn any_capturing(&self, streams: &[$crate::backend::StreamId]) -> bool {
            self.inner.any_capturing(streams)
        }

        fn device(&self) -> u32 {
            self.inner.device()
        }

        fn device_id(&self) -> [u8; 16] {
            self.inner.device_id()
        }

        fn peers(&self) -> Vec<u32> {
            self.inner.peers()
        }

        fn reach(&self, peer: u32) -> Result<(), $crate::error::Error> {
            self.inner.reach(peer)
        }

        fn add_peer(&self, peer: u32) {
            self.inner.add_peer(peer);
        }

        fn now(&self) -> std::time::Duration {
            self.inner.now()
        }
    };
}
pub(super) use handed_on;
