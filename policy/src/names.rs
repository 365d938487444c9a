//! What is chosen by name: read by it, shown by it, and refused with all the names there are.

/// A name that stands for nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {given:?} is not known: use one of {names}", names = known.join(", "))]
pub struct UnknownName {
    /// What was to be named.
    pub what: &'static str,
    /// The name that was given.
    pub given: String,
    /// All there are.
    pub known: Vec<&'static str>,
}

/// What a name of a table stands for.
pub(crate) fn read<T: Copy>(
    what: &'static str,
    table: &[(&'static str, T)],
    given: &str,
) -> Result<T, UnknownName> {
    let found = table.iter().find(|(name, _)| *name == given);
    let known = || table.iter().map(|&(name, _)| name).collect();
    found.map(|&(_, it)| it).ok_or_else(|| UnknownName { what, given: given.to_owned(), known: known() })
}

/// The name of what is in a table; empty for what is not.
pub(crate) fn of<T: PartialEq>(table: &[(&'static str, T)], it: &T) -> &'static str {
    table.iter().find(|(_, other)| other == it).map_or("", |&(name, _)| name)
}
