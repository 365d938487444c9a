//! How much of each link is left (D21): what every route takes off its links and gives back to them.
//!
//! Each direction of an NVLink pair is a resource of its own. **A switch** is different: the topology
//! describes it as one link for each pair, while what runs short is the port by which a GPU is joined
//! to it. There the ports are the resources, and there is one path from a GPU to another: through a
//! third one it would cross the same two ports (D30).

use std::ops::Range;

use millrace_types::topology::{LinkKind, Topology};
use millrace_types::{BytesPerSec, GpuIndex};

use super::search::Search;
use super::{Error, GPUS_MAX, HOPS_MAX, Hops, LINKS_MAX};

/// A set of resources.
pub(super) type Mask = u128;

/// The set of these.
pub(super) fn set(resources: impl IntoIterator<Item = usize>) -> Mask {
    resources.into_iter().fold(0, |mask, resource| mask | 1 << resource)
}

/// The resources of a set.
pub(super) fn bits(mut mask: Mask) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lowest < Mask::BITS).then_some(lowest as usize)
    })
}

/// A rest of a link counts as none if it is under one part in so many: it is not worth a route.
const CRUMB: u64 = 256;

#[derive(Debug)]
struct Resource {
    capacity: u64,
    left: u64,
    /// Running transfers of the pair that it joins.
    owners: u32,
}

/// A way from one GPU to another.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) hops: Hops,
    /// What it crosses.
    pub(super) mask: Mask,
    resources: [u8; HOPS_MAX],
    crosses: u8,
    /// What it would carry if nobody else were there.
    pub(super) width: u64,
}

impl Path {
    fn new(hops: Hops, crossed: &[usize], capacities: &[u64]) -> Self {
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
pub(super) struct Matrix {
    gpus: usize,
    resources: Vec<Resource>,
    /// Those with something left.
    pub(super) open: Mask,
    /// Those with owners.
    pub(super) owned: Mask,
    paths: Vec<Path>,
    /// Which of the paths are whose, by pair.
    of_pair: Vec<Range<usize>>,
    /// What bytes leave a GPU by.
    pub(super) leaving: Vec<Mask>,
    /// What they enter it by.
    pub(super) entering: Vec<Mask>,
    switched: bool,
    /// The least capacity of all.
    pub(super) narrowest: u64,
}

/// Whether the NVLinks are a switch's: at least three GPUs, every pair joined, all at one rate. Says so
/// of four GPUs that are all wired to each other, too, for a topology does not tell the two apart.
fn is_switch(gpus: usize, rates: &[u64]) -> bool {
    let mut pairs = (0..gpus * gpus).filter(|at| at / gpus != at % gpus);
    gpus > 2 && rates[1] > 0 && pairs.all(|at| rates[at] == rates[1])
}

/// The rate from each GPU to each other over the NVLinks that join them, row by row.
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

impl Matrix {
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
        let search = Search { gpus, rates: &rates, hops_max: if switched { 1 } else { hops_max } };
        let (mut paths, mut of_pair) = (Vec::new(), Vec::new());
        for pair in 0..gpus * gpus {
            let (from, to) = (pair / gpus, pair % gpus);
            let found = if from == to { Vec::new() } else { search.paths(from, to) };
            of_pair.push(paths.len()..paths.len() + found.len());
            paths.extend(found.into_iter().map(|hops| {
                let crossed: Vec<usize> = hops.links().flat_map(|(a, b)| number(a, b)).collect();
                Path::new(hops, &crossed, &capacities)
            }));
        }
        let along = |side: usize, gpu: usize| -> Mask {
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

    pub(super) fn path(&self, path: usize) -> &Path {
        &self.paths[path]
    }

    /// A pair's paths, shortest first.
    pub(super) fn paths_of(&self, from: usize, to: usize) -> Range<usize> {
        self.of_pair[from * self.gpus + to].clone()
    }

    /// The path over the NVLink that joins a pair.
    pub(super) fn direct(&self, from: usize, to: usize) -> Option<usize> {
        self.paths_of(from, to).next().filter(|&path| self.paths[path].hops.len() == 2)
    }

    /// The link that a pair owns: the one that joins it. Nobody owns a switch's port.
    pub(super) fn link(&self, from: usize, to: usize) -> Option<usize> {
        self.direct(from, to).filter(|_| !self.switched).and_then(|path| self.paths[path].resources().next())
    }

    /// What others than owners may take.
    pub(super) fn free(&self) -> Mask {
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

    /// What a path could still carry: b_min of the paper.
    pub(super) fn room(&self, path: usize) -> u64 {
        self.paths[path].resources().map(|resource| self.resources[resource].left).min().unwrap_or(0)
    }

    pub(super) fn take(&mut self, path: usize, rate: u64) {
        for at in self.paths[path].resources() {
            let resource = &mut self.resources[at];
            debug_assert!(resource.left >= rate, "a link has no more than is left of it");
            resource.left -= rate;
            self.reopen(at);
        }
    }

    pub(super) fn give(&mut self, path: usize, rate: u64) {
        for at in self.paths[path].resources() {
            let resource = &mut self.resources[at];
            resource.left += rate;
            debug_assert!(resource.left <= resource.capacity, "a link gets back what was taken");
            self.reopen(at);
        }
    }

    fn reopen(&mut self, at: usize) {
        let Resource { capacity, left, .. } = self.resources[at];
        let bit = Mask::from(left > capacity / CRUMB) << at;
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

    /// What is left from one GPU to another over what joins them, of how much.
    pub(super) fn between(&self, from: GpuIndex, to: GpuIndex) -> (BytesPerSec, BytesPerSec) {
        let direct = self.direct(from.0 as usize, to.0 as usize);
        direct.map_or((BytesPerSec(0), BytesPerSec(0)), |path| {
            (BytesPerSec(self.room(path)), BytesPerSec(self.paths[path].width))
        })
    }
}
