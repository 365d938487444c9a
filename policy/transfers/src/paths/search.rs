//! The loop-free paths between two GPUs, found once: shortest first, of equal length the widest
//! first, and at most [`PATHS_MAX`]. Taking paths in this order gives a lone transfer on DGX-V100
//! all that the links can carry.

use millrace_types::GpuIndex;

use super::hops::{HOPS_MAX, RouteHops};

/// Paths kept for a pair. Eight GPUs that are all joined without a switch have 157 paths of at most
/// four links for each pair. DGX-V100 has at most 82 paths of any length.
pub(super) const PATHS_MAX: usize = 256;

/// Paths of one length that are looked at for a pair, to keep the widest. Eight GPUs that are all
/// joined have 720 paths of seven links. Only more GPUs have more than this bound; then only the
/// paths that are found first are looked at.
const FOUND_MAX: usize = 4096;

/// A search for paths over the links of a matrix of rates, `gpus` by `gpus`.
pub(super) struct PathSearch<'a> {
    pub(super) gpus: usize,
    pub(super) rates: &'a [u64],
    pub(super) hops_max: usize,
}

impl PathSearch<'_> {
    /// Returns the first [`PATHS_MAX`] paths of a pair.
    pub(super) fn paths(&self, from: usize, to: usize) -> Vec<RouteHops> {
        let distances = self.distances(to);
        let mut paths = Vec::new();
        let shortest = distances[from].unwrap_or(usize::MAX);
        for hops in shortest..=self.hops_max.min(HOPS_MAX) {
            let mut found = Vec::new();
            let mut walk = Walk { search: self, distances: &distances, to, found: &mut found };
            walk.on(&mut vec![from], 1 << from, hops);
            found.sort_by_key(|path| (std::cmp::Reverse(self.width(path)), *path));
            paths.extend(found);
            if paths.len() >= PATHS_MAX {
                break;
            }
        }
        paths.truncate(PATHS_MAX);
        paths
    }

    /// Returns the rate of a path's slowest link.
    fn width(&self, path: &RouteHops) -> u64 {
        path.links().map(|(a, b)| self.rate(a.0 as usize, b.0 as usize)).min().unwrap_or(0)
    }

    fn rate(&self, a: usize, b: usize) -> u64 {
        self.rates[a * self.gpus + b]
    }

    /// Returns the number of links from each GPU to `to`; `None` if no path exists.
    fn distances(&self, to: usize) -> Vec<Option<usize>> {
        let mut distances = vec![None; self.gpus];
        let mut reached = vec![to];
        distances[to] = Some(0);
        for distance in 1.. {
            let joined = |gpu: usize| reached.iter().any(|&next| self.rate(gpu, next) > 0);
            let next: Vec<_> =
                (0..self.gpus).filter(|&gpu| distances[gpu].is_none() && joined(gpu)).collect();
            if next.is_empty() {
                break;
            }
            next.iter().for_each(|&gpu| distances[gpu] = Some(distance));
            reached = next;
        }
        distances
    }
}

struct Walk<'a, 'b> {
    search: &'a PathSearch<'a>,
    distances: &'a [Option<usize>],
    to: usize,
    found: &'b mut Vec<RouteHops>,
}

impl Walk<'_, '_> {
    /// Extends a path to the end by exactly `hops` links, over none of the GPUs in `seen`.
    fn on(&mut self, path: &mut Vec<usize>, seen: u64, hops: usize) {
        let last = path[path.len() - 1];
        if hops == 0 {
            self.found.push(RouteHops::of(path.iter().map(|&gpu| GpuIndex(gpu as u32))));
            return;
        }
        for next in 0..self.search.gpus {
            let near = self.distances[next].is_some_and(|distance| distance < hops);
            let ends_early = next == self.to && hops > 1;
            if !near || ends_early || seen & 1 << next != 0 || self.search.rate(last, next) == 0 {
                continue;
            }
            if self.found.len() >= FOUND_MAX {
                return;
            }
            path.push(next);
            self.on(path, seen | 1 << next, hops - 1);
            path.pop();
        }
    }
}
