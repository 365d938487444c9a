//! Other GPUs of this machine from which copies may read (T22). The worker passes the handles of
//! their memory between the executors.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use millrace_device::{Device, Error as DeviceError, MemoryExtent, Stream as _};
use millrace_engine::{Engine, Region, Stream};
use millrace_proto::executor::{AddPeer, PeerSource};

use crate::socket::conversions;

/// The memory of another executor's GPU.
#[derive(Debug)]
struct PeerMemory<E: Engine> {
    incarnation: u64,
    memory: <E::Device as Device>::Chunk,
    /// Whether the GPU's contents are lost, so that copies must fail.
    lost: AtomicBool,
}

/// The known peers, at most one peer for each GPU.
#[derive(Debug)]
pub(crate) struct PeerTable<E: Engine>(BTreeMap<u32, Arc<PeerMemory<E>>>);

/// The source of a copy from a peer.
#[derive(Debug)]
pub(crate) struct PeerCopySource<E: Engine> {
    gpu: u32,
    peer: Arc<PeerMemory<E>>,
    /// Offset in the program's or object's range and extent on the peer, in ascending order.
    extents: Vec<(u64, MemoryExtent)>,
}

impl<E: Engine> PeerTable<E> {
    pub(crate) fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub(crate) fn add(
        &mut self,
        device: &E::Device,
        message: &AddPeer,
        memory: OwnedFd,
    ) -> Result<(), DeviceError> {
        let &AddPeer { gpu, incarnation, memory_bytes, .. } = message;
        self.forget(gpu);
        let memory = device.import(memory, MemoryExtent { offset: 0, bytes: memory_bytes })?;
        self.0.insert(gpu, Arc::new(PeerMemory { incarnation, memory, lost: AtomicBool::new(false) }));
        Ok(())
    }

    /// Forgets a peer. Copies that name the peer and have not begun will fail.
    pub(crate) fn forget(&mut self, gpu: u32) {
        if let Some(peer) = self.0.remove(&gpu) {
            peer.lost.store(true, Ordering::Relaxed);
        }
    }

    /// Returns the source that a copy names, or `None` if that executor's memory is unknown.
    pub(crate) fn source(&self, message: PeerSource) -> Option<PeerCopySource<E>> {
        let PeerSource { gpu, incarnation, extents } = message;
        let peer = self.0.get(&gpu).filter(|peer| peer.incarnation == incarnation)?;
        let mut extents: Vec<_> = extents.into_iter().map(conversions::extent).collect();
        extents.sort_unstable_by_key(|&(at, _)| at);
        Some(PeerCopySource { gpu, peer: Arc::clone(peer), extents })
    }
}

impl<E: Engine> PeerCopySource<E> {
    /// Copies bytes of the peer's model or object to the same offset of a region.
    pub(crate) fn copy(
        &self,
        stream: &mut Stream<E>,
        region: &Region<E>,
        bytes: Range<u64>,
    ) -> Result<(), DeviceError> {
        if self.peer.lost.load(Ordering::Relaxed) {
            return Err(DeviceError::PeerLost(format!("GPU {} was lost", self.gpu)));
        }
        let mut at = bytes.start;
        for (start, extent) in &self.extents {
            let end = bytes.end.min(start.saturating_add(extent.bytes));
            if *start <= at && at < end {
                let offset = extent.offset.saturating_add(at - start);
                stream.copy_from_peer(region, &self.peer.memory, offset, at..end)?;
                at = end;
            }
        }
        if at < bytes.end { Err(DeviceError::NotMapped(at..bytes.end)) } else { Ok(()) }
    }
}
