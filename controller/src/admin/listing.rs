//! A page of a list: as many items as are asked for, and no more bytes than a page has.

use std::ops::Bound;

use millrace_cluster_state::first_key;
use millrace_proto::convert;
use millrace_proto::pages::PageRoom;
use millrace_types::limits::PAGE_ITEMS_MAX;
use millrace_types::{Failure, FunctionKey, TenantName};
use prost::Message;

use super::{invalid_name, unknown_token};

/// The items of a page when the request says no number.
const PAGE_ITEMS_DEFAULT: usize = 100;

/// How many items a page has at most, as a request asks.
pub(super) fn page_size(asked: u32) -> usize {
    page_size_or(asked, PAGE_ITEMS_DEFAULT)
}

/// The same of a list that was given whole before lists had pages.
pub(super) fn page_size_or_all(asked: u32) -> usize {
    page_size_or(asked, PAGE_ITEMS_MAX)
}

fn page_size_or(asked: u32, default: usize) -> usize {
    match asked as usize {
        0 => default,
        size => size.min(PAGE_ITEMS_MAX),
    }
}

/// Fills a page with what is found, as `view` shows each item. Gives the last item on the page too, if more
/// come after: the next page begins after that one.
pub(super) fn fill<T, V: Message>(
    found: impl IntoIterator<Item = T>,
    size: usize,
    view: impl Fn(&T) -> V,
) -> (Vec<V>, Option<T>) {
    let (mut page, mut last) = (Vec::new(), None);
    let mut room = PageRoom::default();
    for item in found {
        if page.len() == size {
            return (page, last);
        }
        let shown = view(&item);
        if !room.take(&shown) {
            return (page, last);
        }
        page.push(shown);
        last = Some(item);
    }
    (page, None)
}

/// A list of what has a key of tenant and name: functions, or workflows.
#[derive(Debug)]
pub(super) struct Listing {
    tenant: Option<TenantName>,
    after: Option<FunctionKey>,
    size: usize,
}

impl Listing {
    /// Reads what a request says: an empty tenant is every one, and a token is the key of the last of
    /// the page before.
    pub(super) fn read(tenant: &str, size: u32, token: &str) -> Result<Self, Failure> {
        let tenant = match tenant {
            "" => None,
            tenant => Some(TenantName::new(tenant).map_err(invalid_name)?),
        };
        Ok(Self { tenant, after: page_token(token)?, size: page_size(size) })
    }

    /// From where on to look.
    pub(super) fn start(&self) -> Bound<FunctionKey> {
        match (&self.after, &self.tenant) {
            (Some(after), _) => Bound::Excluded(after.clone()),
            (None, Some(tenant)) => Bound::Included(first_key(tenant)),
            (None, None) => Bound::Unbounded,
        }
    }

    /// A page of what is found from there on, as `view` shows it, and the token of the next: empty on
    /// the last.
    pub(super) fn page<T, V: Message>(
        &self,
        found: impl Iterator<Item = T>,
        key: impl Fn(&T) -> &FunctionKey,
        view: impl Fn(&T) -> V,
    ) -> (Vec<V>, String) {
        let wanted = |item: &T| self.tenant.as_ref().is_none_or(|tenant| key(item).tenant == *tenant);
        let (page, last) = fill(found.take_while(wanted), self.size, view);
        (page, last.map(|item| key(&item).to_string()).unwrap_or_default())
    }
}

fn page_token(token: &str) -> Result<Option<FunctionKey>, Failure> {
    if token.is_empty() {
        return Ok(None);
    }
    let bad = || Failure::malformed(unknown_token(token));
    let (tenant, name) = token.split_once('/').ok_or_else(bad)?;
    convert::function_key(tenant, name).map(Some).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use millrace_types::limits::PAGE_BYTES_MAX;

    use super::*;

    /// The pages of a list of texts of these lengths, by their items.
    fn pages(lengths: &[usize], size: usize) -> Vec<usize> {
        let mut pages = Vec::new();
        let mut from = 0;
        loop {
            let found = lengths[from..].iter().enumerate();
            let (page, last) = fill(found, size, |(_, len)| "x".repeat(**len));
            pages.push(page.len());
            match last {
                Some((at, _)) => from += at + 1,
                None => return pages,
            }
        }
    }

    #[test]
    fn a_page_ends_at_its_items_or_at_its_bytes() {
        assert_eq!(pages(&[], 3), [0]);
        assert_eq!(pages(&[1; 7], 3), [3, 3, 1]);
        assert_eq!(pages(&[1; 6], 3), [3, 3]);
        let quarter = PAGE_BYTES_MAX / 4;
        assert_eq!(
            pages(&[quarter; 7], 100),
            [3, 3, 1],
            "four of them and their lengths are more than a page"
        );
        assert_eq!(pages(&[1, 3 * PAGE_BYTES_MAX, 1], 100), [1, 1, 1], "the large one comes too");
    }
}
