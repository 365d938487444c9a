//! The rate that is left on each link (D21). Every route takes a rate off the crossed links, and
//! gives the rate back at the end.
//!
//! Each direction of an NVLink pair is a resource of its own. **A switch** is different: the
//! topology describes it as a link for each pair, but the scarce resource is the port that joins a
//! GPU to the switch. So the ports are the resources, and there is a single path from a GPU to
//! another: a path through a third GPU would cross the same two ports (D30).

use std::ops::Range;

use millrace_types::topology::{LinkKind, Topology};
use millrace_types::{BytesPerSec, GpuIndex};

use super::error::Error;
use super::hops::{HOPS_MAX, RouteHops};
use super::limits::{GPUS_MAX, LINKS_MAX};
use super::search::PathSearch;

/// A set of resources.
pub(super) type ResourceSet = u128;

/// Returns the set of some resources.
pub(super) fn set(resources: impl IntoIterator<Item = usize>) -> ResourceSet {
    resources.into_iter().fold(0, |mask, resource| mask | 1 << resource)
}

/// Returns the resources of a set.
pub(super) fn bits(mut mask: ResourceSet) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lowest < ResourceSet::BITS).then_some(lowest as usize)
    })
}

/// A link counts as full if at most 1/`CRUMB` of its capacity is left: such a rest is not worth a
/// route.
const CRUMB: u64 = 256;

#[derive(Debug)]
struct Resource {
    capacity: u64,
    left: u64,
    /// Number of running transfers of the pair that the resource joins.
    owners: u32,
}

/// A path from one GPU to another.
#[derive(Debug)]
pub(super) struct CandidatePath {
    pub(super) hops: RouteHops,
    /// The resources that the path crosses.
    pub(super) mask: ResourceSet,
    resources: [u8; HOPS_MAX],
    crosses: u8,
    /// The rate of the path if no other flow used it.
    pub(super) width: u64,
}

impl CandidatePath {
    fn new(hops: RouteHops, crossed: &[usize], capacities: &[u64]) -> Self {
        let mut resources = [0; HOPS_MAX];
        resources.iter_mut().zip(crossed).for_each(|(to, &resource)| *to = resource as u8);
        let width = crossed.iter().map(|&resource| capacities[resource]).min().unwrap_or(0);
        Self { hops, mask: set(crossed.iter().copied()), resources, crosses: crossed.len() as u8, width }
    }

    pub(super) fn resources(&self) -> impl Iterator<Item = usize> + use<> {
        self.resources.into_iter().take(self.crosses.into()).map(usize::from)
    }
}

#[derive(Debug)]
pub(super) struct RateMatrix {
    gpus: usize,
    resources: Vec<Resource>,
    /// Resources with some rate left.
    pub(super) open: ResourceSet,
    /// Resources with owners.
    pub(super) owned: ResourceSet,
    paths: Vec<CandidatePath>,
    /// The range of each pair's paths in `paths`, by pair.
    of_pair: Vec<Range<usize>>,
    /// By GPU: the resources by which bytes leave the GPU.
    pub(super) leaving: Vec<ResourceSet>,
    /// By GPU: the resources by which bytes enter the GPU.
    pub(super) entering: Vec<ResourceSet>,
    switched: bool,
    /// The least capacity of all resources.
    pub(super) narrowest: u64,
}

/// Whether the NVLinks belong to a switch: at least three GPUs, every pair joined, all at one rate.
/// Also true for four GPUs that are all wired to each other, because a topology does not
/// distinguish the two.
fn is_switch(gpus: usize, rates: &[u64]) -> bool {
    let mut pairs = (0..gpus * gpus).filter(|at| at / gpus != at % gpus);
    gpus > 2 && rates[1] > 0 && pairs.all(|at| rates[at] == rates[1])
}

/// Returns the rate from each GPU to each other over the NVLinks that join them, row by row.
pub(super) fn rates(topology: &Topology) -> Result<Vec<u64>, Error> {
    let gpus = topology.gpus.len();
    let mut rates = vec![0; gpus * gpus];
    for link in &topology.links {
        let LinkKind::NvLink { a, b } = link.kind else { continue };
        for (a, b) in [(a, b), (b, a)] {
            if a.0.max(b.0) as usize >= gpus {
                return Err(Error::UnknownGpu(a.max(b)));
            }
            if a != b {
                rates[a.0 as usize * gpus + b.0 as usize] += link.rate.0;
            }
        }
    }
    Ok(rates)
}

impl RateMatrix {
    pub(super) fn new(topology: &Topology, hops_max: usize) -> Result<Self, Error> {
        let gpus = topology.gpus.len();
        if gpus > GPUS_MAX {
            return Err(Error::TooManyGpus(gpus));
        }
        let rates = rates(topology)?;
        let switched = is_switch(gpus, &rates);
        let joined: Vec<usize> = (0..gpus * gpus).filter(|&pair| rates[pair] > 0).collect();
        let capacities: Vec<u64> = if switched {
            vec![rates[1]; gpus * 2]
        } else {
            joined.iter().map(|&pair| rates[pair]).collect()
        };
        if capacities.len() > LINKS_MAX {
            return Err(Error::TooManyLinks(capacities.len()));
        }
        let number = |a: GpuIndex, b: GpuIndex| {
            let pair = a.0 as usize * gpus + b.0 as usize;
            if switched {
                vec![a.0 as usize, gpus + b.0 as usize]
            } else {
                joined.binary_search(&pair).into_iter().collect()
            }
        };
        let search = PathSearch { gpus, rates: &rates, hops_max: if switched { 1 } else { hops_max } };
        let mut paths = Vec::new();
        let mut of_pair = Vec::new();
        for pair in 0..gpus * gpus {
            let from = pair / gpus;
            let to = pair % gpus;
            let found = if from == to { Vec::new() } else { search.paths(from, to) };
            of_pair.push(paths.len()..paths.len() + found.len());
            paths.extend(found.into_iter().map(|hops| {
                let crossed: Vec<usize> = hops.links().flat_map(|(a, b)| number(a, b)).collect();
                CandidatePath::new(hops, &crossed, &capacities)
            }));
        }
        let along = |side: usize, gpu: usize| -> ResourceSet {
            let at = |resource: usize| {
                if switched {
                    resource == side * gpus + gpu
                } else {
                    [joined[resource] / gpus, joined[resource] % gpus][side] == gpu
                }
            };
            set((0..capacities.len()).filter(|&resource| at(resource)))
        };
        let (leaving, entering) = (0..gpus).map(|gpu| (along(0, gpu), along(1, gpu))).unzip();
        let open = set(0..capacities.len());
        let resources =
            capacities.iter().map(|&capacity| Resource { capacity, left: capacity, owners: 0 }).collect();
        let narrowest = capacities.iter().copied().min().unwrap_or(0);
        Ok(Self { gpus, resources, open, owned: 0, paths, of_pair, leaving, entering, switched, narrowest })
    }

    pub(super) fn gpus(&self) -> usize {
        self.gpus
    }

    pub(super) fn path(&self, path: usize) -> &CandidatePath {
        &self.paths[path]
    }

    /// Returns the range of a pair's paths, shortest first.
    pub(super) fn paths_of(&self, from: usize, to: usize) -> Range<usize> {
        self.of_pair[from * self.gpus + to].clone()
    }

    /// Returns the path over the NVLink that joins a pair.
    pub(super) fn direct(&self, from: usize, to: usize) -> Option<usize> {
        self.paths_of(from, to).next().filter(|&path| self.paths[path].hops.len() == 2)
    }

    /// Returns the link that a pair owns: the link that joins the pair. The ports of a switch have
    /// no owner.
    pub(super) fn link(&self, from: usize, to: usize) -> Option<usize> {
        self.direct(from, to).filter(|_| !self.switched).and_then(|path| self.paths[path].resources().next())
    }

    /// Returns the resources that flows other than owners may take.
    pub(super) fn free(&self) -> ResourceSet {
        self.open & !self.owned
    }

    pub(super) fn left(&self, resource: usize) -> u64 {
        self.resources[resource].left
    }

    pub(super) fn resources(&self) -> usize {
        self.resources.len()
    }

    pub(super) fn capacity(&self, resource: usize) -> u64 {
        self.resources[resource].capacity
    }

    /// Returns the rate that a path could still carry: `b_min` of the paper.
    pub(super) fn room(&self, path: usize) -> u64 {
        self.paths[path].resources().map(|resource| self.resources[resource].left).min().unwrap_or(0)
    }

    pub(super) fn take(&mut self, path: usize, rate: u64) {
        for at in self.paths[path].resources() {
            let resource = &mut self.resources[at];
            debug_assert!(resource.left >= rate, "a route takes more than is left of a link");
            resource.left -= rate;
            self.reopen(at);
        }
    }

    pub(super) fn give(&mut self, path: usize, rate: u64) {
        for at in self.paths[path].resources() {
            let resource = &mut self.resources[at];
            resource.left += rate;
            debug_assert!(resource.left <= resource.capacity, "a link gets back more than was taken");
            self.reopen(at);
        }
    }

    fn reopen(&mut self, at: usize) {
        let Resource { capacity, left, .. } = self.resources[at];
        let bit = ResourceSet::from(left > capacity / CRUMB) << at;
        self.open = self.open & !(1 << at) | bit;
    }

    pub(super) fn own(&mut self, link: usize) {
        self.resources[link].owners += 1;
        self.owned |= 1 << link;
    }

    pub(super) fn disown(&mut self, link: usize) {
        let owners = &mut self.resources[link].owners;
        *owners -= 1;
        if *owners == 0 {
            self.owned &= !(1 << link);
        }
    }

    /// Returns the rate that is left between two GPUs over the link that joins them, and the whole
    /// rate of that link.
    pub(super) fn between(&self, from: GpuIndex, to: GpuIndex) -> (BytesPerSec, BytesPerSec) {
        let direct = self.direct(from.0 as usize, to.0 as usize);
        direct.map_or((BytesPerSec(0), BytesPerSec(0)), |path| {
            (BytesPerSec(self.room(path)), BytesPerSec(self.paths[path].width))
        })
    }
}
