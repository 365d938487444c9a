//! How long a silent node is still believed alive (DESIGN §5, §7; the health checks of Torpor §4.5,
//! T16). The leader's table: hears of nodes, ends leases, declares nodes lost.
//!
//! ```text
//!              lease without a word          grace on top
//! believed ──────────────────────► fenced ─────────────────► lost
//!     ▲                              │
//!     └──────────── heard ───────────┘
//! ```
//!
//! A fenced node serves on: only what it wants written into the replicated state is refused, for it
//! may be declared lost at any moment. Lost stands: the command that says so may be on its way into
//! the log, and the node has to register again for a new epoch.
//!
//! Silence is judged by the leader's own clock, so a leader that stood still itself has heard
//! nobody and knows nothing: it grants everyone a full lease again. It finds out by the gap between
//! its ticks, which is why [`Leases::next_wake`] never lets more than a quarter of a lease pass.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{Epoch, NodeName, Timestamp};

/// How long a node may be silent (DESIGN §5).
pub const LEASE: Duration = Duration::from_secs(2);
/// How long it may be silent beyond that. With its functions' new copies, still within the second
/// that DESIGN §7 gives on top of the lease.
pub const GRACE: Duration = Duration::from_millis(500);
/// Ticks in a lease, at least. More than two, so that a late one is told from a stall.
const TICKS_PER_LEASE: u32 = 4;

/// What silence is held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Silence until a node is fenced.
    pub lease: Duration,
    /// Silence beyond that until it is lost.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { lease: LEASE, grace: GRACE }
    }
}

/// One registration of a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// Its name.
    pub node: NodeName,
    /// The number of the registration.
    pub epoch: Epoch,
}

/// What is believed of a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Standing {
    /// Alive.
    Believed,
    /// Perhaps alive: it serves, but its state batches are refused.
    Fenced,
    /// Gone. What it says is ignored.
    Lost,
    /// Not in the table: an older epoch, or never registered.
    Unknown,
}

/// What time brought.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Whose lease ended.
    pub fenced: Vec<Member>,
    /// Whom to declare lost: propose `NodeLost{epoch}` for each. Named again a lease later for as
    /// long as [`Leases::gone`] does not confirm it.
    pub lost: Vec<Member>,
    /// How long the leader stood still, when it did. Everyone who is not lost has a full lease.
    pub stalled: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Believed until then.
    Believed { until: Timestamp },
    /// Fenced; lost from then on.
    Fenced { until: Timestamp },
    /// Lost; to be named again then.
    Lost { again: Timestamp },
}

impl State {
    fn due(self) -> Timestamp {
        match self {
            Self::Believed { until } | Self::Fenced { until } => until,
            Self::Lost { again } => again,
        }
    }

    fn standing(self) -> Standing {
        match self {
            Self::Believed { .. } => Standing::Believed,
            Self::Fenced { .. } => Standing::Fenced,
            Self::Lost { .. } => Standing::Lost,
        }
    }
}

/// The leases a leader has granted. Empty on a controller that does not lead.
#[derive(Debug, Clone)]
pub struct Leases {
    limits: Limits,
    nodes: BTreeMap<NodeName, (Epoch, State)>,
    /// When the leader last looked; `None` while it does not lead.
    ticked: Option<Timestamp>,
}

impl Leases {
    /// Of a controller that does not lead yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, nodes: BTreeMap::new(), ticked: None }
    }

    /// This controller leads from now on. Every live node has a full lease, whatever was believed
    /// of it: it may have been heard by the leader before.
    pub fn elected(&mut self, now: Timestamp, live: impl IntoIterator<Item = Member>) {
        self.ticked = Some(now);
        let believed = self.full(now);
        self.nodes = live.into_iter().map(|member| (member.node, (member.epoch, believed))).collect();
    }

    /// A registration was committed. It has a full lease; an older one of the same name is over.
    /// Ignored while this controller does not lead.
    pub fn registered(&mut self, now: Timestamp, member: Member) {
        if self.ticked.is_none() {
            return;
        }
        let known = self.nodes.get(&member.node).map(|(epoch, _)| *epoch);
        if known.is_none_or(|known| known < member.epoch) {
            self.nodes.insert(member.node, (member.epoch, self.full(now)));
        }
    }

    /// The node's loss was committed, or it left.
    pub fn gone(&mut self, node: &NodeName, epoch: Epoch) {
        if self.nodes.get(node).is_some_and(|(known, _)| *known <= epoch) {
            self.nodes.remove(node);
        }
    }

    /// The node gave a sign of life, of any kind, at `at`. Says what is believed of it now. One from
    /// before its lease was granted, which is looked at only now, takes nothing of it away.
    pub fn heard(&mut self, node: &NodeName, epoch: Epoch, at: Timestamp) -> Standing {
        let until = at + self.limits.lease;
        let Some(state) = self.state_mut(node, epoch) else { return Standing::Unknown };
        *state = match *state {
            State::Believed { until: granted } => State::Believed { until: granted.max(until) },
            State::Fenced { .. } => State::Believed { until },
            lost @ State::Lost { .. } => lost,
        };
        state.standing()
    }

    /// What is believed of a registration, as of the last tick.
    #[must_use]
    pub fn standing(&self, node: &NodeName, epoch: Epoch) -> Standing {
        match self.nodes.get(node) {
            Some((known, state)) if *known == epoch => state.standing(),
            _ => Standing::Unknown,
        }
    }

    /// Time passed: ends leases, and says whom to declare lost.
    pub fn tick(&mut self, now: Timestamp) -> Verdict {
        let Some(last) = self.ticked.replace(now) else { return Verdict::default() };
        let gap = now.since(last);
        if gap > self.limits.lease / 2 {
            self.grant_all(now);
            return Verdict { stalled: Some(gap), ..Verdict::default() };
        }
        let mut verdict = Verdict::default();
        for (node, (epoch, state)) in &mut self.nodes {
            let member = || Member { node: node.clone(), epoch: *epoch };
            if let State::Believed { until } = *state
                && until <= now
            {
                verdict.fenced.push(member());
                *state = State::Fenced { until: until + self.limits.grace };
            }
            if !matches!(state, State::Believed { .. }) && state.due() <= now {
                verdict.lost.push(member());
                *state = State::Lost { again: now + self.limits.lease };
            }
        }
        verdict
    }

    /// When to tick at the latest; `None` while this controller does not lead.
    #[must_use]
    pub fn next_wake(&self) -> Option<Timestamp> {
        let regular = self.ticked? + self.limits.lease / TICKS_PER_LEASE;
        Some(self.nodes.values().map(|(_, state)| state.due()).fold(regular, Timestamp::min))
    }

    fn full(&self, now: Timestamp) -> State {
        State::Believed { until: now + self.limits.lease }
    }

    fn grant_all(&mut self, now: Timestamp) {
        let (full, again) = (self.full(now), now + self.limits.lease);
        for (_, state) in self.nodes.values_mut() {
            *state = if matches!(state, State::Lost { .. }) { State::Lost { again } } else { full };
        }
    }

    fn state_mut(&mut self, node: &NodeName, epoch: Epoch) -> Option<&mut State> {
        self.nodes.get_mut(node).filter(|(known, _)| *known == epoch).map(|(_, state)| state)
    }
}
