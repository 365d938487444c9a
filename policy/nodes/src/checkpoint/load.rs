//! Generator of a node's events for tests of checkpoints: data that is mostly dropped soon, models
//! that move between tiers, and requests that finish. The same seed gives the same events. The
//! tests of `cluster-state` include this file too.

use millrace_types::{
    Alpha, Alphas, Bytes, DataId, Digest, Epoch, FunctionKey, FunctionName, GpuIndex, MemoryTier, ModelCopy,
    NodeName, Priority, SloCounts, TenantName, Usage,
};

use super::Event;

/// Size of a simulated node.
#[derive(Debug, Clone)]
pub(super) struct LoadProfile {
    /// Node that is the home of the data.
    pub(super) node: NodeName,
    /// Number of functions, named f0, f1, and so on.
    pub(super) functions: u64,
    /// Number of GPUs.
    pub(super) gpus: u32,
    /// Maximum number of data pieces held at a time.
    pub(super) live_max: u64,
}

/// Event generator of a simulated node.
#[derive(Debug, Clone)]
pub(super) struct NodeLoad {
    profile: LoadProfile,
    random: u64,
    /// First number of the present data, which ends before `next`; older data is dropped.
    oldest: u64,
    next: u64,
}

impl NodeLoad {
    /// Starts with no data.
    pub(super) fn new(profile: LoadProfile, seed: u64) -> Self {
        Self { profile, random: seed, oldest: 0, next: 0 }
    }

    /// Returns the next event.
    pub(super) fn step(&mut self) -> Event {
        match self.draw(16) {
            0..8 if self.next - self.oldest < self.profile.live_max => self.store(),
            0..8 if self.profile.live_max > 0 => self.drop_data(),
            8 => Event::ModelLoaded { copy: self.copy(), bytes: Bytes::mib(100) },
            9 => Event::ModelDropped { copy: self.copy() },
            10 => {
                let alpha = Alpha::from_ppm(u32::try_from(self.draw(1_000_000)).unwrap_or(0));
                let priority = Priority::default().asked(self.draw(8));
                Event::AlphasSet(Alphas::from([(priority, alpha.unwrap_or_default())]))
            }
            11..14 => {
                let m = self.draw(2);
                Event::Scored { function: self.function(), counts: SloCounts { m, n: 1 } }
            }
            _ => {
                let requests = self.draw(2);
                let idle_ms = self.draw(1_000);
                let gpu_ns = requests * self.draw(50) * 1_000_000;
                Event::Used { function: self.function(), usage: Usage { gpu_ns, requests, idle_ms } }
            }
        }
    }

    /// Stores another piece of data.
    pub(super) fn store(&mut self) -> Event {
        let id = self.id(self.next);
        self.next += 1;
        Event::DataStored { id, bytes: Bytes(4096) }
    }

    /// Returns the key of a function by its number.
    pub(super) fn function_of(number: u64) -> FunctionKey {
        let name = FunctionName::new(&format!("f{number}")).expect("a letter and digits are a valid name");
        FunctionKey { tenant: TenantName::default(), name }
    }

    fn drop_data(&mut self) -> Event {
        let id = self.id(self.oldest);
        self.oldest += 1;
        Event::DataDropped { id }
    }

    fn id(&self, counter: u64) -> DataId {
        DataId { home: self.profile.node.clone(), epoch: Epoch(1), counter }
    }

    fn function(&mut self) -> FunctionKey {
        Self::function_of(self.draw(self.profile.functions.max(1)))
    }

    fn copy(&mut self) -> ModelCopy {
        let model = self.draw(self.profile.functions.max(1));
        let tiers = u64::from(self.profile.gpus) + 1;
        let tier = match u32::try_from(self.draw(tiers)).unwrap_or(0) {
            0 => MemoryTier::Host,
            gpu => MemoryTier::Gpu(GpuIndex(gpu - 1)),
        };
        ModelCopy { digest: Digest::of(&model.to_le_bytes()), tier }
    }

    /// Returns a number below `bound`, from SplitMix64.
    fn draw(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}
