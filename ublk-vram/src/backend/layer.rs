//! A backend around another one: what it does not change is the inner one's.

use super::{Backend, BackendQueue, ChunkMemory, Mapping, QueueId};
use crate::device::PathsInfo;
use crate::error::Result;

/// A layer: a [`Backend`] whose queues do more than the inner one's.
pub(super) trait Layer: Send + Sync {
    /// What it is called in the copy path.
    const NAME: &'static str;

    /// The backend that it is around.
    fn inner(&self) -> &dyn Backend;

    /// [`Backend::open_queue`] of the layer, its errors included.
    fn open_layered(
        &self,
        queue: QueueId,
        copies: usize,
        memory: &[Mapping],
    ) -> Result<Box<dyn BackendQueue>>;
}

impl<L: Layer> Backend for L {
    fn kind(&self) -> &'static str {
        self.inner().kind()
    }

    fn gpu(&self) -> Option<String> {
        self.inner().gpu()
    }

    fn residency(&self) -> Option<&'static str> {
        self.inner().residency()
    }

    fn copy_path(&self) -> String {
        format!("{}, {}", self.inner().copy_path(), L::NAME)
    }

    fn chunks(&self) -> &[ChunkMemory] {
        self.inner().chunks()
    }

    fn cold_files(&self) -> Vec<&'static str> {
        self.inner().cold_files()
    }

    fn paths(&self) -> Option<PathsInfo> {
        self.inner().paths()
    }

    fn open_queue(
        &self,
        queue: QueueId,
        copies: usize,
        memory: &[Mapping],
    ) -> Result<Box<dyn BackendQueue>> {
        self.open_layered(queue, copies, memory)
    }
}
