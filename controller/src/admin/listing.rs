//! Pages of lists, bounded by the requested number of items and by the bytes of a page.

use std::ops::Bound;

use millrace_cluster_state::first_key;
use millrace_proto::convert;
use millrace_proto::pages::PageBudget;
use millrace_types::limits::PAGE_ITEMS_MAX;
use millrace_types::{Failure, FunctionKey, TenantName};
use prost::Message;

use super::{invalid_name, unknown_token};

/// Items of a page if the request gives no number.
const PAGE_ITEMS_DEFAULT: usize = 100;

/// Returns the maximum number of items of a page.
pub(super) fn page_size(asked: u32) -> usize {
    page_size_or(asked, PAGE_ITEMS_DEFAULT)
}

/// Returns the maximum number of items of a page, for lists that older clients expect in one response:
/// without a number, the page is as large as possible.
pub(super) fn page_size_or_all(asked: u32) -> usize {
    page_size_or(asked, PAGE_ITEMS_MAX)
}

fn page_size_or(asked: u32, default: usize) -> usize {
    match asked as usize {
        0 => default,
        size => size.min(PAGE_ITEMS_MAX),
    }
}

/// Fills a page with the items found, converted by `view`. Returns the last item on the page too if
/// more items follow: the next page begins after it.
pub(super) fn fill<T, V: Message>(
    found: impl IntoIterator<Item = T>,
    size: usize,
    view: impl Fn(&T) -> V,
) -> (Vec<V>, Option<T>) {
    let mut page = Vec::new();
    let mut last = None;
    let mut room = PageBudget::default();
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

/// A list of functions or workflows, which have keys of tenant and name.
#[derive(Debug)]
pub(super) struct Listing {
    tenant: Option<TenantName>,
    after: Option<FunctionKey>,
    size: usize,
}

impl Listing {
    /// Parses a request. An empty tenant means every tenant, and the token is the last key of the
    /// previous page.
    pub(super) fn read(tenant: &str, size: u32, token: &str) -> Result<Self, Failure> {
        let tenant = match tenant {
            "" => None,
            tenant => Some(TenantName::new(tenant).map_err(invalid_name)?),
        };
        Ok(Self { tenant, after: page_token(token)?, size: page_size(size) })
    }

    /// Returns the position at which the page begins.
    pub(super) fn start(&self) -> Bound<FunctionKey> {
        match (&self.after, &self.tenant) {
            (Some(after), _) => Bound::Excluded(after.clone()),
            (None, Some(tenant)) => Bound::Included(first_key(tenant)),
            (None, None) => Bound::Unbounded,
        }
    }

    /// Returns a page of the items found, converted by `view`, and the token of the next page; empty
    /// for the last page.
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
    use millrace_types::Reason;
    use millrace_types::limits::PAGE_BYTES_MAX;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_page_token_is_a_key_or_is_refused(token in "[a-z0-9-]{0,80}/[a-z0-9-]{0,80}|.{0,200}") {
            match page_token(&token) {
                Ok(None) => prop_assert!(token.is_empty()),
                Ok(Some(key)) => prop_assert_eq!(page_token(&key.to_string()).ok(), Some(Some(key))),
                Err(failure) => prop_assert_eq!(failure.reason, Reason::MalformedRequest),
            }
        }
    }

    /// Returns the number of items on each page of a list of texts with these lengths.
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
    fn a_page_is_bounded_by_items_and_by_bytes() {
        assert_eq!(pages(&[], 3), [0]);
        assert_eq!(pages(&[1; 7], 3), [3, 3, 1]);
        assert_eq!(pages(&[1; 6], 3), [3, 3]);
        let quarter = PAGE_BYTES_MAX / 4;
        assert_eq!(pages(&[quarter; 7], 100), [3, 3, 1], "four texts and their lengths exceed a page");
        assert_eq!(pages(&[1, 3 * PAGE_BYTES_MAX, 1], 100), [1, 1, 1], "the large text is returned too");
    }
}
