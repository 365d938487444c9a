//! The folder for the report files of some runs.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::harness_usage::HarnessUsage;
use super::run_report::RunReport;
use super::{html, junit};

/// The file for CI servers.
const JUNIT: &str = "junit.xml";
/// The file for people: a single file that contains its styles and plots.
const HTML: &str = "report.html";

/// A folder of report files. The files are rewritten after each run, so that the results survive
/// any end of the harness.
#[derive(Debug)]
pub struct ReportFolder {
    dir: PathBuf,
    reports: Vec<RunReport>,
    /// Samples of the harness's own resources.
    own: Vec<HarnessUsage>,
}

impl ReportFolder {
    /// Creates the folder if necessary and writes files without a run, before anything is started.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn begin(dir: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let folder = Self { dir: dir.to_owned(), reports: Vec::new(), own: Vec::new() };
        folder.write()?;
        Ok(folder)
    }

    /// Adds the report of a run.
    ///
    /// # Errors
    /// If the files cannot be written.
    pub fn add(&mut self, report: RunReport) -> anyhow::Result<()> {
        self.reports.push(report);
        self.write()
    }

    /// Adds a sample of the harness's own resources.
    ///
    /// # Errors
    /// If the files cannot be written.
    pub fn note(&mut self, own: HarnessUsage) -> anyhow::Result<()> {
        self.own.push(own);
        self.write()
    }

    /// Returns the file to open in a browser.
    #[must_use]
    pub fn page(&self) -> PathBuf {
        self.dir.join(HTML)
    }

    fn write(&self) -> anyhow::Result<()> {
        self.put(JUNIT, &junit::render(&self.reports)?)?;
        self.put(HTML, &html::render(&self.reports, &self.own)?)
    }

    fn put(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.dir.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::run_report::tests::failed;

    #[test]
    fn every_added_run_is_in_both_files() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("new");
        let mut folder = ReportFolder::begin(&at).unwrap();
        let other = RunReport { scenario: "worker-kill".into(), ..failed(Vec::new()) };
        for report in [failed(Vec::new()), other] {
            folder.add(report).unwrap();
        }
        for name in [JUNIT, HTML] {
            let text = std::fs::read_to_string(at.join(name)).unwrap();
            assert!(text.contains("leader-kill") && text.contains("worker-kill"), "{text}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_created_is_an_error_at_the_start() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(
            ReportFolder::begin(&file.path().join("under")).unwrap_err().to_string().contains("cannot make")
        );
    }
}
