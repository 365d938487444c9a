//! Settings chosen by name: parsing, display, and an error that lists all names.

/// A name that is not in its table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {given:?} is not known: use one of {names}", names = known.join(", "))]
pub struct UnknownName {
    /// Kind of the named setting, such as "migration policy".
    pub what: &'static str,
    /// Name that was given.
    pub given: String,
    /// All valid names.
    pub known: Vec<&'static str>,
}

/// Returns the value of a name in a table.
pub fn read<T: Copy>(what: &'static str, table: &[(&'static str, T)], given: &str) -> Result<T, UnknownName> {
    let found = table.iter().find(|(name, _)| *name == given);
    let known = || table.iter().map(|&(name, _)| name).collect();
    found.map(|&(_, it)| it).ok_or_else(|| UnknownName { what, given: given.to_owned(), known: known() })
}

/// Returns the name of a value, or an empty text if the table lacks the value.
pub fn of<T: PartialEq>(table: &[(&'static str, T)], it: &T) -> &'static str {
    table.iter().find(|(_, other)| other == it).map_or("", |&(name, _)| name)
}
