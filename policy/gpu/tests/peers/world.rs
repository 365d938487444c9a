//! Three GPUs joined by NVLinks, a fabric, and executors whose memory is modelled chunk by chunk.
//!
//! A message from one core to another waits in their channel until its delivery by the test, so
//! every order that preserves the order within each channel is possible. Executors obey at once,
//! except for copies and runs, which end when the test says so.

mod wiring;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use millrace_core::Core as _;
use millrace_core::ids::{Generation, RequestKey, RunId, SeatIndex};
use millrace_gpu::{ExecutorIsolation, GpuCore};
use millrace_memory::{BlockPlacement, BlockSize, CHUNK, MemoryMap};
use millrace_transfers::fabric::{
    self, BatchFailure, BatchGrant, LinkScheduler, TransferCargo, WeightsCargo,
};
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu as GpuOf, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Incarnation, ModelId, Timestamp};

use self::wiring::chunks_of;

pub(crate) const GPUS: usize = 3;
pub(crate) const MODELS: u32 = 5;
/// Chunks of a GPU's memory: room for two or three models.
const GPU_CHUNKS: u64 = 24;
/// Maximum number of requests on one GPU at a time.
const REQUESTS_MAX: usize = 3;

pub(crate) fn chunks(model: ModelId) -> u32 {
    [7, 9, 12, 8, 6][model.0 as usize]
}

/// A chunk of a model's weights.
type Chunk = (ModelId, u32);
/// Content of each chunk of a GPU's memory.
type Memory = Vec<Option<Chunk>>;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Mail {
    ToFabric(fabric::Event),
    ToGpu(usize, millrace_gpu::Event),
}

/// The fabric, or a GPU with its executor.
type Who = usize;
const FABRIC: Who = GPUS;

struct Place {
    core: GpuCore,
    incarnation: Incarnation,
    /// Models with a loaded program.
    programs: BTreeSet<ModelId>,
    /// The place in the GPU's memory of each chunk of a model's weights.
    mapped: BTreeMap<ModelId, (Generation, Vec<u32>)>,
    copies: VecDeque<BatchGrant>,
    runs: VecDeque<(RunId, ModelId, Generation)>,
}

impl Place {
    /// Whether the target of a copy is still mapped. Otherwise the executor refuses the copy before
    /// reading any block.
    fn takes(&self, grant: &BatchGrant) -> bool {
        let WeightsCargo { model, generation, .. } = weights(grant);
        self.mapped.get(&model).is_some_and(|mapped| mapped.0 == generation)
    }
}

pub(crate) struct World {
    isolation: ExecutorIsolation,
    /// Unit of memory of all GPUs.
    block: BlockSize,
    fabric: LinkScheduler,
    places: Vec<Place>,
    /// Memory of every incarnation: a copy may still read the memory of a dead incarnation.
    memories: BTreeMap<(usize, Incarnation), Memory>,
    channels: BTreeMap<(Who, Who), VecDeque<Mail>>,
    now: Timestamp,
    last_key: u64,
    /// Requests that were assigned and have not ended.
    pub(crate) requests: usize,
    /// Number of chunks copied from peers.
    pub(crate) from_peers: u32,
}

/// Returns the weights of a grant: no other cargo moves in this test.
fn weights(grant: &BatchGrant) -> WeightsCargo {
    let TransferCargo::Weights(weights) = grant.cargo else { panic!("{grant:?}") };
    weights
}

fn topology() -> Topology {
    let gpu = |index: u32| GpuOf {
        index: GpuIndex(index),
        gpu_type: "test".to_owned(),
        memory: Bytes(CHUNK.0 * GPU_CHUNKS),
        host_path: vec![LinkId(index)],
    };
    let link = |kind, gb| TopologyLink { kind, rate: BytesPerSec::gb(gb) };
    let mut links = vec![link(LinkKind::Pcie, 12); GPUS];
    for (a, b) in [(0, 1), (0, 2), (1, 2)] {
        links.push(link(LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) }, 48));
    }
    Topology { name: "test".to_owned(), gpus: (0..GPUS as u32).map(gpu).collect(), links }
}

impl World {
    pub(crate) fn new(isolation: ExecutorIsolation, placement: BlockPlacement, block: BlockSize) -> Self {
        let memory = Bytes(CHUNK.0 * GPU_CHUNKS);
        let place = |index: u32| Place {
            core: GpuCore::new(GpuIndex(index), MemoryMap::with(memory, block, placement))
                .with_isolation(isolation),
            incarnation: Incarnation(0),
            programs: BTreeSet::new(),
            mapped: BTreeMap::new(),
            copies: VecDeque::new(),
            runs: VecDeque::new(),
        };
        let mut world = Self {
            isolation,
            block,
            fabric: LinkScheduler::new(&topology()),
            places: (0..GPUS as u32).map(place).collect(),
            memories: BTreeMap::new(),
            channels: BTreeMap::new(),
            now: Timestamp(1 << 40),
            last_key: 0,
            requests: 0,
            from_peers: 0,
        };
        for index in 0..GPUS {
            for model in (0..MODELS).map(ModelId) {
                let weights = Bytes(CHUNK.0 * u64::from(chunks(model)));
                world.gpu(index, millrace_gpu::Event::Install { model, memory: weights, weights });
            }
            world.start(index);
        }
        world
    }

    /// Starts an executor with memory of its own.
    fn start(&mut self, index: usize) {
        let incarnation = Incarnation(self.places[index].incarnation.0 + 1);
        self.places[index].incarnation = incarnation;
        self.memories.insert((index, incarnation), vec![None; GPU_CHUNKS as usize]);
        self.gpu(index, millrace_gpu::Event::Up { incarnation });
    }

    /// Kills an executor and starts another.
    pub(crate) fn kill(&mut self, index: usize) {
        let place = &mut self.places[index];
        place.programs.clear();
        place.mapped.clear();
        place.copies.clear();
        place.runs.clear();
        self.gpu(index, millrace_gpu::Event::Down);
        self.start(index);
    }

    /// Kills the process of a loaded model. The GPU's memory stays.
    pub(crate) fn kill_program(&mut self, index: usize, model: ModelId) {
        let place = &mut self.places[index];
        if !place.programs.remove(&model) {
            return;
        }
        place.mapped.remove(&model);
        place.runs.retain(|run| run.1 != model);
        let (lost, left): (VecDeque<BatchGrant>, _) =
            place.copies.drain(..).partition(|copy| weights(copy).model == model);
        place.copies = left;
        lost.iter().for_each(|copy| self.report(index, copy, Some(BatchFailure::NotBegun)));
        self.gpu(index, millrace_gpu::Event::ProgramLost { model });
    }

    /// Advances time to the next wake-up of a core.
    pub(crate) fn wait(&mut self) -> bool {
        let wakes = self.places.iter().filter_map(|place| place.core.next_wake());
        let Some(at) = wakes.min() else { return false };
        self.now = self.now.max(at);
        (0..GPUS).for_each(|index| self.gpu(index, millrace_gpu::Event::Tick));
        true
    }

    pub(crate) fn assign(&mut self, index: usize, seat: u32, model: ModelId, from: Option<usize>) {
        let place = &self.places[index];
        if place.core.requests() >= REQUESTS_MAX {
            return;
        }
        let incarnation = place.incarnation;
        self.last_key += 1;
        self.requests += 1;
        let key = RequestKey(self.last_key);
        let from = from.map(|from| GpuIndex(from as u32));
        let seat = SeatIndex(seat);
        let event = millrace_gpu::Event::Assign {
            seat,
            key,
            model,
            incarnation,
            from,
            deadline: None,
            right: millrace_gpu::ComputeRight::Free,
        };
        self.gpu(index, event);
    }

    pub(crate) fn prefetch(&mut self, index: usize, model: ModelId) {
        self.gpu(index, millrace_gpu::Event::Prefetch { model });
    }

    /// Cancels the request that is running on the first seat.
    pub(crate) fn cancel(&mut self, index: usize) {
        let running = self.places[index].core.running().next();
        if let Some(key) = running {
            self.gpu(index, millrace_gpu::Event::Cancel { key });
        }
    }

    /// Delivers the oldest message of a channel that is not empty.
    pub(crate) fn deliver(&mut self, which: usize) -> bool {
        self.channels.retain(|_, waiting| !waiting.is_empty());
        let count = self.channels.len().max(1);
        let Some(waiting) = self.channels.values_mut().nth(which % count) else { return false };
        match waiting.pop_front().unwrap() {
            Mail::ToFabric(event) => self.fabric(event),
            Mail::ToGpu(index, event) => self.gpu(index, event),
        }
        true
    }

    /// Carries out the first copy that an executor was granted.
    pub(crate) fn copy(&mut self, index: usize) -> bool {
        let Some(grant) = self.places[index].copies.pop_front() else { return false };
        self.now = self.now.max(grant.not_before);
        let blocks = self.places[index].mapped.get(&weights(&grant).model);
        let to = blocks.filter(|(generation, _)| *generation == weights(&grant).generation);
        let Some((_, to)) = to.cloned() else {
            self.report(index, &grant, Some(BatchFailure::Faulty));
            return true;
        };
        let read = self.read(&grant);
        self.from_peers += if grant.peer.is_some() { read.len() as u32 } else { 0 };
        let memory = self.memories.get_mut(&(index, self.places[index].incarnation)).unwrap();
        for (chunk, found) in grant.chunks.clone().zip(read) {
            memory[to[chunk as usize] as usize] = found;
        }
        self.report(index, &grant, None);
        true
    }

    /// Returns the chunks that a copy reads.
    fn read(&self, grant: &BatchGrant) -> Vec<Option<Chunk>> {
        let model = weights(grant).model;
        let Some(peer) = &grant.peer else {
            return grant.chunks.clone().map(|chunk| Some((model, chunk))).collect();
        };
        let memory = &self.memories[&(peer.gpu.0 as usize, peer.incarnation)];
        let first = (peer.skip.0 / CHUNK.0) as usize;
        let places = chunks_of(&peer.blocks, peer.block).skip(first).take(grant.chunks.len());
        places.map(|place| memory[place as usize]).collect()
    }

    /// Fails the first copy that an executor was granted.
    pub(crate) fn fail_copy(&mut self, index: usize, why: BatchFailure) -> bool {
        let Some(grant) = self.places[index].copies.pop_front() else { return false };
        self.report(index, &grant, Some(why));
        true
    }

    fn report(&mut self, index: usize, grant: &BatchGrant, failure: Option<BatchFailure>) {
        let transfer = grant.transfer;
        let batch = grant.batch;
        let event = match failure {
            None => fabric::Event::Done { transfer, batch },
            Some(why) => fabric::Event::Failed { transfer, batch, why },
        };
        self.post(index, FABRIC, Mail::ToFabric(event));
    }

    /// Ends the first run, if all its weights have arrived.
    pub(crate) fn run(&mut self, index: usize) -> bool {
        let place = &mut self.places[index];
        let Some(&(run, model, generation)) = place.runs.front() else { return false };
        let Some((_, blocks)) = place.mapped.get(&model).filter(|mapped| mapped.0 == generation) else {
            place.runs.pop_front();
            self.gpu(index, millrace_gpu::Event::RunFailed { run, why: millrace_gpu::RunFailure::NotThere });
            return true;
        };
        let memory = &self.memories[&(index, place.incarnation)];
        let there = |&block: &u32| memory[block as usize].is_some();
        if !blocks.iter().all(there) {
            return false;
        }
        for (chunk, &block) in (0..).zip(blocks) {
            assert_eq!(memory[block as usize], Some((model, chunk)), "a run reads another model's weights");
        }
        place.runs.pop_front();
        let started = self.now;
        let finished = self.now;
        let done = millrace_gpu::Event::RunDone {
            run,
            started,
            finished,
            waited: Duration::ZERO,
            held: Duration::ZERO,
            sm: Duration::ZERO,
            token: None,
        };
        self.gpu(index, done);
        true
    }

    /// Checks that every running copy reads its own model, although other models may need the room
    /// of its source.
    pub(crate) fn check(&self) {
        for grant in self.places.iter().flat_map(|place| place.copies.iter().filter(|it| place.takes(it))) {
            let expected: Vec<_> =
                grant.chunks.clone().map(|chunk| Some((weights(grant).model, chunk))).collect();
            assert_eq!(self.read(grant), expected, "{grant:?}");
        }
        for place in &self.places {
            if self.isolation == ExecutorIsolation::Resident {
                assert!(
                    place.programs.iter().eq(place.mapped.keys()),
                    "the processes differ from the cached models"
                );
            }
        }
    }

    /// Checks that no lock, grant or request is left.
    pub(crate) fn check_idle(&self) {
        assert_eq!((self.requests, self.fabric.in_flight()), (0, 0));
        for place in &self.places {
            assert_eq!((place.core.requests(), place.core.transfers(), place.copies.len()), (0, 0, 0));
            let memory = place.core.memory();
            assert!(memory.regions().all(|(_, region)| !region.is_locked()));
        }
    }
}
