//! The class that all functions share whose requests run together ([`crate::batching`]).
//!
//! Put first, such a function runs in smaller batches; put last, it waits for a queue which batches, that
//! grow as it does, keep from ever being empty, and is late though there is capacity for it. Both take
//! throughput from all of them, so none goes before another for what it scored. But once half of them
//! are hopeless the load is more than batches can serve, and they give way to all other functions.

use super::flows::Class;

#[derive(Debug, Default)]
pub(super) struct Together {
    functions: usize,
    hopeless: usize,
    given_up: bool,
}

impl Together {
    /// A function has another class of its own; `None`: it shares none.
    pub(super) fn change(&mut self, before: Option<Class>, after: Option<Class>) {
        self.functions -= usize::from(before.is_some());
        self.hopeless -= usize::from(before == Some(Class::Hopeless));
        self.functions += usize::from(after.is_some());
        self.hopeless += usize::from(after == Some(Class::Hopeless));
    }

    /// What they share.
    pub(super) fn class(&self) -> Class {
        if self.given_up { Class::Hopeless } else { Class::Safe }
    }

    /// Looks again whether they are given up, which is from when half of them are hopeless until no more
    /// than a quarter is; tells whether that has changed. All of them then change, so that it must not
    /// come and go with each.
    pub(super) fn turn(&mut self) -> bool {
        let given_up = if self.given_up {
            self.hopeless * 4 > self.functions
        } else {
            self.hopeless > 0 && self.hopeless * 2 >= self.functions
        };
        std::mem::replace(&mut self.given_up, given_up) != given_up
    }

    #[cfg(test)]
    pub(super) fn check(&self, own: impl Iterator<Item = Class> + Clone) {
        let hopeless = own.clone().filter(|own| *own == Class::Hopeless).count();
        assert_eq!((self.functions, self.hopeless), (own.count(), hopeless));
    }
}
