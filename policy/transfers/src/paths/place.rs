//! Places a workflow's functions on GPUs (D19) as MAPA does, on the GPUs with the fastest NVLinks
//! to each other. Absent: other workflows and other nodes, which are the job of `placement`.

use millrace_types::GpuIndex;
use millrace_types::topology::Topology;

use super::error::Error;
use super::limits::GPUS_MAX;
use super::matrix::rates;

/// Assignments that are tried, at most. Eight functions on eight GPUs have 109,601 partial and
/// complete assignments, so up to this size the result is optimal. Beyond it, the result is the
/// best of the assignments that were tried.
const TRIES_MAX: u32 = 200_000;

/// Two functions of which one passes data to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataEdge {
    /// One function, counted from 0.
    pub a: usize,
    /// The other function.
    pub b: usize,
    /// The amount of data that they pass, in any unit.
    pub weight: u32,
}

/// Returns a separate GPU for each of the functions 0, 1, 2 and so on. The assignment maximizes the
/// sum over all edges of weight times the rate of the NVLink between the two GPUs. Of equal
/// assignments, the first in the order of `free` wins.
///
/// # Errors
/// [`Error::TooFewGpus`], [`Error::UnknownGpu`], [`Error::UnknownFunction`],
/// [`Error::TooManyGpus`].
pub fn place(
    topology: &Topology,
    functions: usize,
    edges: &[DataEdge],
    free: &[GpuIndex],
) -> Result<Vec<GpuIndex>, Error> {
    if topology.gpus.len() > GPUS_MAX {
        return Err(Error::TooManyGpus(topology.gpus.len()));
    }
    if let Some(gpu) = free.iter().find(|gpu| gpu.0 as usize >= topology.gpus.len()) {
        return Err(Error::UnknownGpu(*gpu));
    }
    if let Some(edge) = edges.iter().find(|edge| edge.a.max(edge.b) >= functions) {
        return Err(Error::UnknownFunction(edge.a.max(edge.b)));
    }
    if functions > free.len() {
        return Err(Error::TooFewGpus { functions, free: free.len() });
    }
    let rates = rates(topology)?;
    let rate = |a: GpuIndex, b: GpuIndex| rates[a.0 as usize * topology.gpus.len() + b.0 as usize];
    let fastest = free.iter().flat_map(|&a| free.iter().map(move |&b| rate(a, b))).max().unwrap_or(0);
    let mut search = PlacementSearch { edges, free, rate: &rate, fastest, tries: 0, best: None };
    search.on(&mut Vec::with_capacity(functions), functions, 0);
    Ok(search.best.map(|(_, gpus)| gpus).unwrap_or_default())
}

struct PlacementSearch<'a> {
    edges: &'a [DataEdge],
    free: &'a [GpuIndex],
    rate: &'a dyn Fn(GpuIndex, GpuIndex) -> u64,
    fastest: u64,
    tries: u32,
    best: Option<(u128, Vec<GpuIndex>)>,
}

impl PlacementSearch<'_> {
    /// Places the next function on every GPU in turn. Skips a GPU if the assignment could not beat
    /// the best even if all remaining edges had the fastest rate.
    fn on(&mut self, placed: &mut Vec<GpuIndex>, functions: usize, score: u128) {
        self.tries += 1;
        if placed.len() == functions {
            if self.best.as_ref().is_none_or(|(best, _)| score > *best) {
                self.best = Some((score, placed.clone()));
            }
            return;
        }
        let next = placed.len();
        let open = self.edges.iter().filter(|edge| edge.a.max(edge.b) > next);
        let hoped: u128 = open.map(|edge| u128::from(edge.weight) * u128::from(self.fastest)).sum();
        for &gpu in self.free {
            if placed.contains(&gpu) {
                continue;
            }
            let scored = score + self.gained(placed, gpu);
            let hopeless = self.best.as_ref().is_some_and(|(best, _)| scored + hoped <= *best);
            if hopeless || (self.tries >= TRIES_MAX && self.best.is_some()) {
                continue;
            }
            placed.push(gpu);
            self.on(placed, functions, scored);
            placed.pop();
        }
    }

    /// Returns the score of the edges between the next function, on this GPU, and the functions
    /// placed before.
    fn gained(&self, placed: &[GpuIndex], gpu: GpuIndex) -> u128 {
        let here = |edge: &&DataEdge| edge.a.max(edge.b) == placed.len() && edge.a != edge.b;
        let add = |edge: &DataEdge| {
            u128::from(edge.weight) * u128::from((self.rate)(placed[edge.a.min(edge.b)], gpu))
        };
        self.edges.iter().filter(here).map(add).sum()
    }
}
