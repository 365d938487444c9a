//! The scenarios that are part of the harness, as embedded files.

use super::run::ChaosScenario;
use super::spec::ScenarioSpec;

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// The embedded files, by name.
        const FILES: &[(&str, &str)] =
            &[$((concat!($name, ".yaml"), include_str!(concat!("../../scenarios/", $name, ".yaml")))),*];
    };
}

files![
    "leader-kill",
    "follower-kill",
    "worker-kill",
    "executor-kill",
    "executor-storm",
    "leader-storm",
    "all-controllers-kill",
    "rolling-restart",
    "frozen-processes",
    "partition",
    "split-brain",
    "worker-cut",
    "unplugged",
    "bad-links",
    "torn-store",
    "full-disk",
    "clock-jump",
    "stalled-disk",
    "stalled-disk-leader",
    "gpu-faults",
    "worker-oom",
    "poison-request",
    "workflows",
    "sequences",
    "hostile-clients",
    "everything-at-once",
];

/// Returns every scenario of the library.
///
/// # Panics
/// Never: a test parses every file.
#[must_use]
pub fn all() -> Vec<ChaosScenario> {
    let parse =
        |&(name, text): &(&str, &str)| ScenarioSpec::parse(name, text).expect("embedded scenarios are valid");
    FILES.iter().map(parse).map(|spec| ChaosScenario { spec }).collect()
}

/// Returns the scenario with this name.
#[must_use]
pub fn find(name: &str) -> Option<ChaosScenario> {
    all().into_iter().find(|scenario| scenario.name() == name)
}

/// Returns the text of the file with this name.
#[cfg(test)]
pub(super) fn text(name: &str) -> &'static str {
    let file = format!("{name}.yaml");
    FILES.iter().find(|(own, _)| *own == file).expect("the file is embedded").1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_embedded_file_is_a_scenario_with_the_name_of_the_file() {
        for (file, text) in FILES {
            let spec = ScenarioSpec::parse(file, text).unwrap_or_else(|error| panic!("{error:#}"));
            assert_eq!(format!("{}.yaml", spec.name), *file);
            assert_eq!(find(&spec.name).map(|found| found.about().to_owned()), Some(spec.about));
        }
        assert!(find("none").is_none());
    }

    #[test]
    fn every_file_in_the_folder_is_embedded() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios");
        let mut there: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let mut embedded: Vec<_> = FILES.iter().map(|(file, _)| (*file).to_owned()).collect();
        there.sort();
        embedded.sort();
        assert_eq!(there, embedded);
    }
}
