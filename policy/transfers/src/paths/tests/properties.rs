//! Properties that hold for any transfers that begin and end, on DGX-V100, on a switch and on any
//! topology.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::paths::matrix::ResourceSet;
use crate::paths::running::FlowKind;

#[derive(Debug, Clone)]
enum Step {
    Begin(u32, u32),
    Host { gpu: u32, direction: HostDirection },
    End(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let transfer = (0..8u32, 0..8u32)
        .prop_filter("two GPUs", |(from, to)| from != to)
        .prop_map(|(from, to)| Step::Begin(from, to));
    let direction = prop_oneof![Just(HostDirection::ToGpu), Just(HostDirection::FromGpu)];
    let host = (0..8u32, direction).prop_map(|(gpu, direction)| Step::Host { gpu, direction });
    prop_oneof![
        8 => transfer,
        1 => host,
        4 => any::<usize>().prop_map(Step::End),
    ]
}

fn topology() -> impl Strategy<Value = Topology> {
    let links = prop::collection::vec((0..8u32, 0..8u32, 1..7u64), 0..20);
    let random = links.prop_map(|links| {
        let links = links.into_iter().map(|(a, b, rate)| (a, b, rate * 8));
        machine(8, &links.filter(|link| link.0 != link.1).collect::<Vec<_>>())
    });
    prop_oneof![3 => Just(dgx_v100()), 1 => Just(dgx_a100()), 3 => random]
}

/// The paths, and a caller's knowledge of the routes.
struct Node {
    paths: PathPlanner,
    begun: u64,
    routes: BTreeMap<FlowId, Vec<NvlinkRoute>>,
}

impl Node {
    fn take(&mut self, changes: Vec<RouteChange>) {
        for change in changes {
            let before = self.routes.insert(change.flow, change.routes.clone());
            assert_ne!(before.as_ref(), Some(&change.routes), "a change without a difference");
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Begin(from, to) => {
                self.begun += 1;
                let flow = FlowId(self.begun);
                let changes = self.paths.begin(flow, GpuIndex(*from), GpuIndex(*to)).unwrap();
                self.take(changes);
                assert!(self.routes.contains_key(&flow), "the new flow is not reported");
            }
            Step::Host { gpu, direction } => {
                self.begun += 1;
                let flow = FlowId(self.begun);
                let plan = self.paths.begin_host(flow, GpuIndex(*gpu), *direction).unwrap();
                let forwarded = plan.routes.iter().filter(|route| route.forward.len() > 1);
                let mut routes: Vec<_> =
                    forwarded.map(|it| NvlinkRoute { hops: it.forward, rate: it.rate }).collect();
                routes.sort_by_key(|route| route.hops);
                self.routes.insert(flow, routes);
                self.take(plan.changes);
            }
            Step::End(which) => {
                if let Some(flow) = self.routes.keys().nth(which % self.routes.len().max(1)).copied() {
                    self.routes.remove(&flow);
                    let changes = self.paths.end(flow);
                    self.take(changes);
                }
            }
        }
        self.audit();
    }

    /// Checks that the capacity of each resource is the rate left plus the rates of routes.
    fn nothing_is_lost(&self) {
        let matrix = &self.paths.running.matrix;
        for resource in 0..matrix.resources() {
            let used: u64 =
                (0..self.paths.running.flows.len()).map(|at| self.paths.running.rate_on(at, resource)).sum();
            assert_eq!(matrix.left(resource) + used, matrix.capacity(resource), "resource {resource}");
        }
    }

    fn audit(&self) {
        self.nothing_is_lost();
        for flow in &self.paths.running.flows {
            let mut routes = self.paths.routes(flow.id).unwrap();
            assert_eq!(sum(&routes), flow.total);
            for route in &routes {
                let hops = route.hops.as_slice();
                assert!(route.rate.0 > 0);
                assert!(route.hops.links().all(|(a, b)| self.paths.capacity(a, b).0 > 0), "{route:?} exists");
                let once = hops.iter().collect::<std::collections::BTreeSet<_>>().len();
                assert_eq!(once, hops.len(), "{route:?} has no loop");
                let ends = [hops[0].0 as usize, hops[hops.len() - 1].0 as usize];
                let joins = match flow.role {
                    FlowKind::Transfer => ends == [flow.from, flow.to],
                    FlowKind::Forward => ends.contains(&flow.from),
                };
                assert!(joins, "{route:?}");
            }
            let mut told = self.routes[&flow.id].clone();
            if flow.role == FlowKind::Forward {
                told.sort_by_key(|route| route.hops);
                routes.sort_by_key(|route| route.hops);
            }
            assert_eq!(told, routes, "the reported routes differ from the actual routes");
            if self.paths.selection == Selection::FaasTube && flow.role == FlowKind::Transfer {
                self.has_a_route(flow);
                self.wants_nothing_free(flow);
            }
        }
    }

    /// Checks that a flow has a route wherever NVLinks lead.
    fn has_a_route(&self, flow: &PathFlow) {
        let leads = !self.paths.running.matrix.paths_of(flow.from, flow.to).is_empty();
        assert_eq!(flow.total > 0, leads, "{flow:?}");
    }

    /// Checks that a flow uses every free path.
    fn wants_nothing_free(&self, flow: &PathFlow) {
        let matrix = &self.paths.running.matrix;
        let own = flow.link.map_or(0, |link| 1 << link);
        let free = matrix.free() | matrix.open & own;
        let unused = matrix.paths_of(flow.from, flow.to).find(|&path| matrix.path(path).mask & !free == 0);
        assert!(
            unused.is_none() || flow.parts.is_full(),
            "{:?} {flow:?}",
            unused.map(|path| matrix.path(path))
        );
    }

    /// Checks that owners have at least an equal part of the owned link, and that no flow with
    /// another route is on an owned link.
    fn owners_keep_an_equal_part_of_owned_links(&self) {
        let running = &self.paths.running;
        for (at, flow) in running.flows.iter().enumerate() {
            let Some(link) = flow.link else { continue };
            let part = running.matrix.capacity(link) / running.users(link);
            assert!(
                running.rate_on(at, link) >= part - part / 100,
                "{} of {part}: {flow:?}",
                running.rate_on(at, link)
            );
        }
        for flow in &running.flows {
            let strange: ResourceSet =
                running.matrix.owned & flow.mask & !flow.link.map_or(0, |link| 1 << link);
            let over = |path: usize| running.matrix.path(path).mask & strange != 0;
            let parts = flow.parts.as_slice();
            assert!(strange == 0 || parts.iter().all(|part| over(part.path)), "{flow:?}");
        }
    }

    /// Ends all flows: then the matrix is the topology again (D21).
    fn end_all(&mut self) {
        while !self.routes.is_empty() {
            self.step(&Step::End(0));
        }
        let matrix = &self.paths.running.matrix;
        assert_eq!((0..matrix.resources()).find(|&at| matrix.left(at) != matrix.capacity(at)), None);
        assert_eq!(matrix.owned, 0);
    }
}

fn node(topology: &Topology, selection: Selection, hops_max: Option<u32>) -> Node {
    let paths = paths(topology, selection, hops_max);
    Node { paths, begun: 0, routes: BTreeMap::new() }
}

fn hops_max() -> impl Strategy<Value = Option<u32>> {
    prop_oneof![Just(None), (1..5u32).prop_map(Some)]
}

fn selection() -> impl Strategy<Value = Selection> {
    prop_oneof![4 => Just(Selection::FaasTube), 1 => Just(Selection::Direct), 1 => Just(Selection::Ucx)]
}

proptest! {
    #[test]
    fn link_rates_are_neither_lost_nor_given_twice_and_no_flow_starves(
        topology in topology(),
        selection in selection(),
        hops_max in hops_max(),
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let mut node = node(&topology, selection, hops_max);
        steps.iter().for_each(|step| node.step(step));
        node.end_all();
    }

    #[test]
    fn owners_keep_an_equal_part_of_owned_links(
        topology in topology(),
        hops_max in hops_max(),
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let mut node = node(&topology, Selection::FaasTube, hops_max);
        for step in &steps {
            node.step(step);
            node.owners_keep_an_equal_part_of_owned_links();
        }
        node.end_all();
    }
}
