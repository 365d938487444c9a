//! The links of a node, and the flows that are laid over them. Every flow that crosses a link
//! counts at that link, so each link has a sum of its own. (`FaaSTube`'s global `BW_all` holds only
//! if all links are alike.)
//!
//! A flow with a choice of links first takes the room that is free. A flow that needs more is then
//! laid by shortest augmenting paths (Edmonds and Karp): other flows are moved to alternative
//! links, with unchanged total rates. So a rate is found to fit exactly if there is a way to fit
//! the rate.

use std::collections::VecDeque;

use millrace_types::topology::{LinkId, Topology};

use super::Error;

/// The rate of every link, and the next link on the way to the host.
#[derive(Debug)]
pub(super) struct HostLinkTree {
    rate: Vec<u64>,
    /// The next link. A PCIe link leads to its switch's uplink, if there is one.
    next: Vec<Option<usize>>,
    /// By link: the link at which flows that enter by it are counted. See [`Self::meter`].
    meter: Vec<usize>,
}

impl HostLinkTree {
    /// Returns the links of a machine. Host paths that share a link must share all links after it.
    pub(super) fn of(topology: &Topology) -> Result<Self, Error> {
        let rate: Vec<_> = topology.links.iter().map(|link| link.rate.0).collect();
        let next = vec![None; rate.len()];
        let mut links = Self { rate, next, meter: Vec::new() };
        for gpu in &topology.gpus {
            let place = |&link| links.place(link).ok_or(Error::UnknownLink(link));
            let path = gpu.host_path.iter().map(place).collect::<Result<Vec<_>, _>>()?;
            for (pair, &from) in path.windows(2).zip(&gpu.host_path) {
                if links.next[pair[0]].replace(pair[1]).is_some_and(|before| before != pair[1]) {
                    return Err(Error::Apart(from));
                }
            }
        }
        let all = 0..links.rate.len();
        if let Some(round) = all.clone().find(|&link| links.chain(link).nth(all.len()).is_some()) {
            return Err(Error::Circle(LinkId(round as u32)));
        }
        let mut offered = vec![0u64; all.len()];
        for link in all.clone() {
            links.next[link].into_iter().for_each(|next| {
                offered[next] = offered[next].saturating_add(links.rate[link]);
            });
        }
        let short = |link: &usize| offered[*link] > links.rate[*link];
        links.meter = all.map(|link| links.chain(link).filter(short).last().unwrap_or(link)).collect();
        Ok(links)
    }

    /// Returns the last link on the way to the host that the links before it could overfill, or
    /// `link` itself if there is none. Every flow that shares a scarce link on this way crosses the
    /// meter.
    pub(super) fn meter(&self, link: usize) -> usize {
        self.meter[link]
    }

    /// Returns the position of a link; `None` if the link does not exist.
    pub(super) fn place(&self, link: LinkId) -> Option<usize> {
        usize::try_from(link.0).ok().filter(|&place| place < self.rate.len())
    }

    /// Returns a link and the links that it leads to.
    fn chain(&self, link: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(link), |&link| self.next[link])
    }
}

/// The rate of a flow by one link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LinkRate {
    pub(super) link: usize,
    pub(super) rate: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Node {
    Flow(usize),
    Into(usize),
    OutOf(usize),
}

/// Flows laid over links, numbered from 0 in the order given.
#[derive(Debug)]
pub(super) struct FlowLayout<'a> {
    links: &'a HostLinkTree,
    used: Vec<u64>,
    flows: Vec<Vec<LinkRate>>,
    /// Nodes without a way to the host. Such a node stays dead, because rates are only added.
    dead: Vec<bool>,
}

impl<'a> FlowLayout<'a> {
    /// Returns flows that may enter by these links and have no rate yet.
    pub(super) fn new(links: &'a HostLinkTree, flows: impl Iterator<Item = Vec<usize>>) -> Self {
        let part = |link| LinkRate { link, rate: 0 };
        let flows: Vec<Vec<_>> = flows.map(|flow| flow.into_iter().map(part).collect()).collect();
        let nodes = flows.len() + 2 * links.rate.len();
        Self { links, used: vec![0; links.rate.len()], flows, dead: vec![false; nodes] }
    }

    /// Returns the rates of each flow by link.
    pub(super) fn into_flows(self) -> Vec<Vec<LinkRate>> {
        self.flows
    }

    /// Adds up to `want` to the rate of a flow, and returns the rate that was added.
    pub(super) fn push(&mut self, flow: usize, want: u64) -> u64 {
        let mut got = self.push_straight(flow, want);
        while got < want {
            let path = self.augmenting_path(flow);
            let room = path.windows(2).map(|step| self.room(step[0], step[1])).min();
            let Some(more) = room.map(|room| room.min(want - got)) else { break };
            debug_assert!(more > 0, "a path without room");
            for step in path.windows(2) {
                self.add(step[0], step[1], more);
            }
            got += more;
        }
        got
    }

    /// Does the same without moving any other flow, which is enough for most flows.
    fn push_straight(&mut self, flow: usize, want: u64) -> u64 {
        let mut got = 0;
        for place in 0..self.flows[flow].len() {
            let link = self.flows[flow][place].link;
            let room = self.links.chain(link).map(|link| self.left(link)).min().unwrap_or(0);
            let more = room.min(want - got);
            self.flows[flow][place].rate += more;
            self.links.chain(link).for_each(|link| self.used[link] += more);
            got += more;
        }
        got
    }

    /// Gives a flow without a rate all of `want`, or nothing. Returns whether the flow was
    /// admitted.
    pub(super) fn admit(&mut self, flow: usize, want: u64) -> bool {
        // The rate that is taken back was on none of the nodes that were dead before.
        let dead = self.dead.clone();
        let admitted = self.push(flow, want) == want;
        if !admitted {
            self.dead = dead;
            for place in 0..self.flows[flow].len() {
                let part = &mut self.flows[flow][place];
                let link = part.link;
                let rate = std::mem::take(&mut part.rate);
                self.links.chain(link).for_each(|link| self.used[link] -= rate);
            }
        }
        admitted
    }

    /// Shares the remaining rates among some flows, max-min fairly over each link: level by level,
    /// until the links are full. Less than a byte per second for each flow stays unused.
    pub(super) fn fill(&mut self, members: &[usize]) {
        let parts = |&flow: &usize| (0..self.flows[flow].len()).map(move |part| (flow, part));
        let mut open: Vec<_> = members.iter().flat_map(parts).collect();
        // Each round fills at least one link.
        for _ in 0..=self.used.len() {
            let mut crossing = vec![0u64; self.used.len()];
            for &(flow, part) in &open {
                self.links.chain(self.flows[flow][part].link).for_each(|link| crossing[link] += 1);
            }
            let level = |(link, &count): (usize, &u64)| self.left(link).checked_div(count);
            let Some(step) = crossing.iter().enumerate().filter_map(level).min() else { return };
            for &(flow, part) in &open {
                let part = &mut self.flows[flow][part];
                part.rate += step;
                self.links.chain(part.link).for_each(|link| self.used[link] += step);
            }
            let is_open = |link: usize| self.left(link) >= crossing[link];
            open.retain(|&(flow, part)| self.links.chain(self.flows[flow][part].link).all(is_open));
        }
        debug_assert!(open.is_empty(), "a round filled no link");
    }

    fn left(&self, link: usize) -> u64 {
        self.links.rate[link] - self.used[link]
    }

    fn rate_of(&self, flow: usize, link: usize) -> u64 {
        let part = self.flows[flow].iter().find(|part| part.link == link);
        part.map_or(0, |part| part.rate)
    }

    /// Returns the rate that can be added from a node to the next, or taken back in the other
    /// direction.
    fn room(&self, from: Node, to: Node) -> u64 {
        match (from, to) {
            (Node::Into(link), Node::OutOf(out)) if link == out => self.left(link),
            (Node::OutOf(link), Node::Into(into)) if link == into => self.used[link],
            (Node::Into(link), Node::Flow(flow)) => self.rate_of(flow, link),
            (Node::Into(_), Node::OutOf(before)) => self.used[before],
            (Node::Flow(_) | Node::OutOf(_), _) => u64::MAX,
            (Node::Into(_), Node::Into(_)) => 0,
        }
    }

    fn add(&mut self, from: Node, to: Node, more: u64) {
        match (from, to) {
            (Node::Into(link), Node::OutOf(out)) if link == out => self.used[link] += more,
            (Node::OutOf(link), Node::Into(into)) if link == into => self.used[link] -= more,
            (Node::Flow(flow), Node::Into(link)) => self.part(flow, link, |rate| rate + more),
            (Node::Into(link), Node::Flow(flow)) => self.part(flow, link, |rate| rate - more),
            // A step between links carries the flow of the first link, and is counted there.
            _ => {}
        }
    }

    fn part(&mut self, flow: usize, link: usize, change: impl Fn(u64) -> u64) {
        let part = self.flows[flow].iter_mut().find(|part| part.link == link);
        part.into_iter().for_each(|part| part.rate = change(part.rate));
    }

    /// Returns the shortest way from a flow to the host on which every step has room; empty if
    /// there is none. The search is breadth first, which bounds the number of iterations of
    /// [`Self::push`].
    fn augmenting_path(&mut self, flow: usize) -> Vec<Node> {
        let start = Node::Flow(flow);
        let mut before: Vec<Option<Node>> = vec![None; self.dead.len()];
        before[self.place(start)] = Some(start);
        let mut queue = VecDeque::from([start]);
        let mut beyond = Vec::new();
        while let Some(node) = queue.pop_front() {
            if let Node::OutOf(link) = node
                && self.links.next[link].is_none()
            {
                let back = |&node: &Node| before[self.place(node)].filter(|&before| before != node);
                let mut path: Vec<_> = std::iter::successors(Some(node), back).collect();
                path.reverse();
                return path;
            }
            beyond.clear();
            self.beyond(node, &mut beyond);
            for &to in &beyond {
                let place = self.place(to);
                if !self.dead[place] && before[place].is_none() && self.room(node, to) > 0 {
                    before[place] = Some(node);
                    queue.push_back(to);
                }
            }
        }
        for (dead, before) in self.dead.iter_mut().zip(before) {
            *dead |= before.is_some();
        }
        Vec::new()
    }

    /// Returns the index of a node among all nodes.
    fn place(&self, node: Node) -> usize {
        match node {
            Node::Flow(flow) => flow,
            Node::Into(link) => self.flows.len() + link,
            Node::OutOf(link) => self.flows.len() + self.used.len() + link,
        }
    }

    /// Appends the nodes to which a step from a node may lead.
    fn beyond(&self, node: Node, beyond: &mut Vec<Node>) {
        match node {
            Node::Flow(flow) => beyond.extend(self.flows[flow].iter().map(|part| Node::Into(part.link))),
            Node::Into(link) => {
                beyond.push(Node::OutOf(link));
                beyond.extend((0..self.flows.len()).map(Node::Flow));
                let leads_here = |&from: &usize| self.links.next[from] == Some(link);
                beyond.extend((0..self.used.len()).filter(leads_here).map(Node::OutOf));
            }
            Node::OutOf(link) => {
                beyond.extend(self.links.next[link].map(Node::Into));
                beyond.push(Node::Into(link));
            }
        }
    }
}
