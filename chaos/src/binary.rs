//! Finds the binary under test, and the folder of the compose file.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

const NAME: &str = "millrace";
/// The folder of the compose file in the repository in which these binaries are built.
const DEPLOY: &str = "deploy/compose";
const COMPOSE_FILE: &str = "compose.yaml";

/// Returns the named folder, or the folder in the repository that contains the current folder or
/// this program.
pub(crate) fn deploy(named: Option<&Path>) -> anyhow::Result<Option<PathBuf>> {
    if let Some(path) = named {
        let file = path.join(COMPOSE_FILE);
        file.metadata().with_context(|| format!("there is no {}", file.display()))?;
        return Ok(Some(path.canonicalize().context("cannot resolve the folder")?));
    }
    let own = std::env::current_exe().context("cannot find this program")?;
    let here = std::env::current_dir().context("there is no current folder")?;
    let folders = here.ancestors().chain(own.ancestors()).map(|folder| folder.join(DEPLOY));
    Ok(folders.into_iter().find(|folder| folder.join(COMPOSE_FILE).is_file()))
}

/// Returns the named binary, or the binary that was built with this one. The latter is beside this
/// binary, or for tests one folder above, or in `target/`, where a release build goes first.
pub(crate) fn find(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(path) = named {
        return path.canonicalize().with_context(|| format!("there is no {}", path.display()));
    }
    let own = std::env::current_exe().context("cannot find this program")?;
    let beside = own.ancestors().skip(1).take(2).map(|folder| folder.join(NAME));
    let built = ["release", "debug"].map(|profile| Path::new("target").join(profile).join(NAME));
    let found = beside.chain(built).find(|path| path.is_file());
    match found {
        Some(path) => path.canonicalize().context("cannot resolve the binary"),
        None => bail!(
            "no millrace binary beside {} or in target/: build it with 'cargo build --bin millrace', or name it with --millrace",
            own.display()
        ),
    }
}
