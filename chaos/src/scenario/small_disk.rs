pub(super) fn not_allowed() -> Option<String> {
    None
}
