//! The state of each link: cut, slow or neither. Pure.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use serde::Deserialize;

/// An end of a link.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkParty {
    /// A controller, by its id.
    Controller(u64),
    /// A worker, by its name.
    Worker(String),
    /// Any other process or client, to which no rule applies.
    Outside,
}

/// The fate of connections that a cut held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestoreMode {
    /// The connections continue: the partition was shorter than TCP's timeout.
    Resume,
    /// The connections are closed: the partition was longer than TCP's timeout.
    Reset,
}

/// The direction in which a link is cut.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CutDirection {
    /// Both directions are cut.
    #[default]
    Both,
    /// No data from the party arrives while the cut lasts; data to the party arrives.
    Out,
    /// No data to the party arrives while the cut lasts; data from the party arrives.
    In,
}

impl fmt::Display for CutDirection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Both => "both ways",
            Self::Out => "outgoing data only",
            Self::In => "incoming data only",
        })
    }
}

/// The delays and losses of a slow link, in each direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkSlowness {
    /// Delay of a packet.
    pub delay: Duration,
    /// Number of lost packets in a thousand. TCP sends a lost packet again, so the packet is late, and
    /// later packets wait.
    pub loss_permille: u32,
    /// Maximum number of bytes per second; `None` for no limit.
    pub bytes_per_second: Option<NonZeroU64>,
}

impl fmt::Display for LinkSlowness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} longer each way", self.delay)?;
        if self.loss_permille > 0 {
            write!(f, ", {} of 1000 packets lost at first", self.loss_permille)?;
        }
        match self.bytes_per_second {
            Some(rate) => write!(f, ", {rate} bytes a second"),
            None => Ok(()),
        }
    }
}

/// The state of a direction of a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ProxyLinkState {
    pub(super) cut: bool,
    pub(super) slowness: LinkSlowness,
}

/// The state of every direction of a link that is cut or slow, by sender and receiver.
#[derive(Debug, Default)]
pub(super) struct LinkRules {
    links: BTreeMap<(LinkParty, LinkParty), ProxyLinkState>,
    /// Number of restores that reset held connections. A connection compares this number with its
    /// value at the start.
    resets: u64,
}

impl LinkRules {
    pub(super) fn cut(&mut self, one: &[LinkParty], other: &[LinkParty], way: CutDirection) {
        for a in one {
            for b in other {
                if way != CutDirection::In {
                    self.link(a, b).cut = true;
                }
                if way != CutDirection::Out {
                    self.link(b, a).cut = true;
                }
            }
        }
    }

    pub(super) fn slow(&mut self, among: &[LinkParty], slowness: LinkSlowness) {
        for a in among {
            for b in among.iter().filter(|&b| b != a) {
                self.link(a, b).slowness = slowness;
            }
        }
    }

    pub(super) fn mend(&mut self, how: RestoreMode) {
        self.links.clear();
        self.resets += u64::from(how == RestoreMode::Reset);
    }

    pub(super) fn state(&self, from: &LinkParty, to: &LinkParty) -> ProxyLinkState {
        self.links.get(&(from.clone(), to.clone())).copied().unwrap_or_default()
    }

    /// Returns every direction that is cut, by sender and receiver.
    pub(super) fn cuts(&self) -> Vec<(LinkParty, LinkParty)> {
        self.links.iter().filter(|(_, state)| state.cut).map(|(ends, _)| ends.clone()).collect()
    }

    pub(super) fn resets(&self) -> u64 {
        self.resets
    }

    fn link(&mut self, from: &LinkParty, to: &LinkParty) -> &mut ProxyLinkState {
        self.links.entry((from.clone(), to.clone())).or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    #[test]
    fn a_cut_separates_the_two_sides_and_leaves_links_within_a_side() {
        let [a, b, c] = [1, 2, 3].map(LinkParty::Controller);
        let worker = LinkParty::Worker("w".into());
        let mut rules = LinkRules::default();
        rules.cut(&[a.clone(), worker.clone()], &[b.clone(), c.clone()], CutDirection::Both);
        for (one, other) in [(&a, &b), (&c, &a), (&b, &worker)] {
            assert!(rules.state(one, other).cut && rules.state(other, one).cut, "{one:?} {other:?}");
        }
        for (one, other) in [(&a, &worker), (&b, &c), (&LinkParty::Outside, &b)] {
            assert!(!rules.state(one, other).cut, "{one:?} {other:?}");
        }
        rules.mend(RestoreMode::Resume);
        assert_eq!((rules.state(&a, &b), rules.resets()), (ProxyLinkState::default(), 0));
        rules.mend(RestoreMode::Reset);
        assert_eq!(rules.resets(), 1);
    }

    #[test]
    fn a_link_may_be_cut_in_one_direction() {
        let [a, b] = [1, 2].map(LinkParty::Controller);
        for (way, out, back) in [(CutDirection::Out, true, false), (CutDirection::In, false, true)] {
            let mut rules = LinkRules::default();
            rules.cut(slice::from_ref(&a), slice::from_ref(&b), way);
            assert_eq!((rules.state(&a, &b).cut, rules.state(&b, &a).cut), (out, back), "{way:?}");
        }
    }

    #[test]
    fn slowness_applies_between_all_named_parties() {
        let [a, b, c] = [1, 2, 3].map(LinkParty::Controller);
        let mut rules = LinkRules::default();
        let slowness = LinkSlowness { delay: Duration::from_millis(5), ..LinkSlowness::default() };
        rules.slow(&[a.clone(), b.clone()], slowness);
        assert_eq!(rules.state(&b, &a).slowness, slowness);
        assert_eq!(rules.state(&b, &c).slowness, LinkSlowness::default());
    }
}
