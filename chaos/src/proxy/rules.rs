//! Which links are cut or slow. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

/// An end of a link.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Party {
    /// A controller, by its id.
    Controller(u64),
    /// A worker, by its name.
    Worker(String),
    /// Whoever else connects: no rule concerns it.
    Outside,
}

/// What becomes of connections that a cut held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mend {
    /// They go on: the partition was shorter than TCP's patience.
    Resume,
    /// They are closed: it was longer.
    Reset,
}

/// The state of one link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct State {
    pub(super) cut: bool,
    pub(super) delay: Duration,
}

/// Every link that is not as it should be. Links have no direction.
#[derive(Debug, Default)]
pub(super) struct Rules {
    links: BTreeMap<(Party, Party), State>,
    /// Mends that reset what was held, so far: a connection compares it with what it was before.
    resets: u64,
}

impl Rules {
    pub(super) fn cut(&mut self, one: &[Party], other: &[Party]) {
        for a in one {
            for b in other {
                self.link(a, b).cut = true;
            }
        }
    }

    pub(super) fn delay(&mut self, among: &[Party], by: Duration) {
        for (index, a) in among.iter().enumerate() {
            for b in &among[index + 1..] {
                self.link(a, b).delay = by;
            }
        }
    }

    pub(super) fn mend(&mut self, how: Mend) {
        self.links.clear();
        self.resets += u64::from(how == Mend::Reset);
    }

    pub(super) fn state(&self, a: &Party, b: &Party) -> State {
        self.links.get(&ends(a, b)).copied().unwrap_or_default()
    }

    pub(super) fn resets(&self) -> u64 {
        self.resets
    }

    fn link(&mut self, a: &Party, b: &Party) -> &mut State {
        self.links.entry(ends(a, b)).or_default()
    }
}

fn ends(a: &Party, b: &Party) -> (Party, Party) {
    let (first, second) = if a <= b { (a, b) } else { (b, a) };
    (first.clone(), second.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_is_between_the_sides_and_not_within_them() {
        let [a, b, c] = [1, 2, 3].map(Party::Controller);
        let worker = Party::Worker("w".into());
        let mut rules = Rules::default();
        rules.cut(&[a.clone(), worker.clone()], &[b.clone(), c.clone()]);
        for (one, other) in [(&a, &b), (&c, &a), (&b, &worker)] {
            assert!(rules.state(one, other).cut && rules.state(other, one).cut, "{one:?} {other:?}");
        }
        for (one, other) in [(&a, &worker), (&b, &c), (&Party::Outside, &b)] {
            assert!(!rules.state(one, other).cut, "{one:?} {other:?}");
        }
        rules.mend(Mend::Resume);
        assert_eq!((rules.state(&a, &b), rules.resets()), (State::default(), 0));
        rules.mend(Mend::Reset);
        assert_eq!(rules.resets(), 1);
    }

    #[test]
    fn a_delay_is_among_all_of_those_named() {
        let [a, b, c] = [1, 2, 3].map(Party::Controller);
        let mut rules = Rules::default();
        rules.delay(&[a.clone(), b.clone()], Duration::from_millis(5));
        assert_eq!(rules.state(&b, &a).delay, Duration::from_millis(5));
        assert_eq!(rules.state(&b, &c).delay, Duration::ZERO);
    }
}
