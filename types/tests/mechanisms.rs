//! Test of the page about the papers' mechanisms: each row that a comment cites is in a table of the page, each
//! path in the page exists, and each test that the page names is a function of the file before it.

mod workspace;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const PAGE: &str = "docs/develop/mechanisms.md";
/// The letters of the papers: FaaSTube, LALB and O3, Torpor, FaST-GShare.
const PAPERS: [char; 4] = ['D', 'L', 'T', 'F'];

/// Returns whether a word is the id of a row: the letter of a paper and two digits.
fn is_row(word: &str) -> bool {
    let mut letters = word.chars();
    let paper = letters.next().is_some_and(|letter| PAPERS.contains(&letter));
    paper && word.len() == 3 && letters.all(|letter| letter.is_ascii_digit())
}

/// Returns the rows that the comments of a source file cite.
fn cited(source: &str) -> BTreeSet<String> {
    let comments = source.lines().filter_map(|line| line.split_once("//")).map(|(_, comment)| comment);
    let words = comments.flat_map(|comment| comment.split(|letter: char| !letter.is_alphanumeric()));
    words.filter(|word| is_row(word)).map(str::to_owned).collect()
}

/// Returns the cells of each row of a table, by the row's id.
fn rows(page: &str) -> BTreeMap<String, Vec<String>> {
    let lines = page.lines().filter(|line| line.starts_with('|'));
    let cells = lines.map(|line| {
        line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
    });
    cells.filter(|cells| is_row(&cells[0])).map(|cells| (cells[0].clone(), cells)).collect()
}

/// Returns the texts between backticks.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Returns the path at the beginning of a text, without a name of code behind two colons; `None` if the text
/// does not begin with a folder of the workspace.
fn path_of(text: &str) -> Option<&str> {
    let path = text.split("::").next()?;
    let (folder, _) = path.split_once('/')?;
    (!folder.is_empty() && workspace::root().join(folder).is_dir()).then_some(path)
}

#[test]
fn each_row_that_a_comment_cites_is_in_the_page() {
    let page = rows(&workspace::text(Path::new(PAGE)));
    let mut missing = Vec::new();
    for ending in [".rs", ".proto"] {
        for file in workspace::files(ending) {
            let lacking = cited(&workspace::text(&file)).into_iter().filter(|row| !page.contains_key(row));
            missing.extend(lacking.map(|row| format!("{}: {row}", file.display())));
        }
    }
    assert!(missing.is_empty(), "{PAGE} has no row for:\n{}", missing.join("\n"));
}

#[test]
fn each_path_and_test_in_the_page_exists() {
    let mut wrong = Vec::new();
    for (row, cells) in rows(&workspace::text(Path::new(PAGE))) {
        for text in cells.iter().flat_map(|cell| quoted(cell)) {
            let Some(path) = path_of(text) else { continue };
            if !workspace::root().join(path).exists() {
                wrong.push(format!("{row}: {path} does not exist"));
            } else if let Some((_, test)) = text.split_once("::") {
                let name = test.rsplit("::").next().unwrap_or_default();
                let source = workspace::text(Path::new(path));
                if !source.contains(&format!("fn {name}(")) {
                    wrong.push(format!("{row}: {path} has no function {name}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{PAGE}:\n{}", wrong.join("\n"));
}

#[test]
fn rows_and_citations_are_read_from_tables_and_comments_alone() {
    let page =
        "| row | mechanism |\n|---|---|\n| D01 | a graph, `a/b.rs::c` |\ntext about D02\n| x | D03 |\n";
    let read = rows(page);
    assert_eq!(read.keys().collect::<Vec<_>>(), ["D01"]);
    assert_eq!(quoted(&read["D01"][1]).collect::<Vec<_>>(), ["a/b.rs::c"]);
    let source = "let D04 = 1; // reads T10, not T100 or XT11\n/// (L05)\n";
    assert_eq!(cited(source).into_iter().collect::<Vec<_>>(), ["L05", "T10"]);
}
