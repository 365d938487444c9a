//! How a worker lays out its GPUs' memory.

use millrace_types::Bytes;
use millrace_worker::start::memory::{Config, Grid, LAYOUTS, Layout};

use super::one_of;
use crate::failure::Failure;

/// Which blocks a model gets, and how the rest stays together.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct GpuMemory {
    /// How GPU memory is laid out: any free blocks (best-fit), any in partitions that are kept whole
    /// (partitions), pieces of common sizes apart from the rest (two-tier), or released pieces kept as
    /// they are (pool).
    #[arg(long, value_name = "NAME", default_value_t, value_parser = one_of(LAYOUTS))]
    gpu_memory_layout: Layout,
    /// A partition's length, of the layouts that have them: 2MiB times a power of two [default: 128MiB].
    #[arg(long, value_name = "SIZE")]
    gpu_memory_partition: Option<Bytes>,
    /// The common sizes of two-tier, ascending [default: 2MiB,20MiB].
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    gpu_memory_blocks: Vec<Bytes>,
    /// What other pieces of two-tier begin at multiples of: 2MiB times a power of two [default: 16MiB].
    #[arg(long, value_name = "SIZE")]
    gpu_memory_buddy: Option<Bytes>,
}

impl GpuMemory {
    /// The layout, checked.
    pub(crate) fn grid(&self) -> Result<Grid, Failure> {
        let sizes = Config::default();
        let partition = self.gpu_memory_partition.unwrap_or(sizes.partition);
        // A shorter partition has to be enough to say.
        let common = || sizes.regular.iter().copied().filter(|&size| size <= partition).collect();
        let given = Some(self.gpu_memory_blocks.clone()).filter(|given| !given.is_empty());
        let regular = given.unwrap_or_else(common);
        let irregular_min = self.gpu_memory_buddy.unwrap_or(sizes.irregular_min.min(partition));
        // One partition is emptied at a time: what comes meanwhile for its models waits for no more.
        let sizes = Config { partition, regular, irregular_min, step: partition, ..sizes };
        self.gpu_memory_layout.of(sizes).grid().map_err(|error| {
            Failure::usage(format!("GPU memory cannot be laid out so: {error}"))
                .hint("partition is --gpu-memory-partition, regular --gpu-memory-blocks, irregular_min --gpu-memory-buddy")
        })
    }

    /// The same options, to be typed again.
    pub(crate) fn words(&self) -> Vec<String> {
        let mut words = vec!["--gpu-memory-layout".to_owned(), self.gpu_memory_layout.to_string()];
        let size = |flag: &str, size: &Bytes| [flag.to_owned(), size.get().to_string()];
        words.extend(self.gpu_memory_partition.iter().flat_map(|it| size("--gpu-memory-partition", it)));
        words.extend(self.gpu_memory_blocks.iter().flat_map(|it| size("--gpu-memory-blocks", it)));
        words.extend(self.gpu_memory_buddy.iter().flat_map(|it| size("--gpu-memory-buddy", it)));
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::options;

    fn parsed(line: &str) -> Result<GpuMemory, clap::Error> {
        options(line.split_whitespace())
    }

    #[test]
    fn a_layout_has_one_of_the_names_and_the_sizes_given() {
        for (name, layout) in LAYOUTS {
            let memory = parsed(&format!("--gpu-memory-layout {name}")).unwrap();
            let expected = Config { step: Config::default().partition, ..layout.of(Config::default()) };
            assert_eq!(memory.grid(), Ok(expected.grid().unwrap()));
        }
        let refused = parsed("--gpu-memory-layout buddies").unwrap_err().to_string();
        assert!(refused.contains("best-fit, partitions, two-tier, pool"), "{refused}");
        let memory = parsed(
            "--gpu-memory-layout two-tier --gpu-memory-partition 32MiB --gpu-memory-blocks 4MiB,8MiB --gpu-memory-buddy 8MiB",
        );
        let expected = Config {
            partition: Bytes::mib(32),
            regular: vec![Bytes::mib(4), Bytes::mib(8)],
            irregular_min: Bytes::mib(8),
            step: Bytes::mib(32),
            ..Layout::TwoTier.of(Config::default())
        };
        assert_eq!(memory.unwrap().grid(), Ok(expected.grid().unwrap()));
    }

    #[test]
    fn sizes_that_do_not_fit_together_are_refused_with_the_options_to_change() {
        assert!(parsed("--gpu-memory-partition 8MiB").unwrap().grid().is_ok());
        let line = "--gpu-memory-partition 8MiB --gpu-memory-blocks 2MiB,20MiB";
        let refused = parsed(line).unwrap().grid().unwrap_err();
        let said = refused.message.unwrap();
        assert!(said.contains("more than a partition of 8.0 MiB"), "{said}");
        assert!(refused.hint.unwrap().contains("--gpu-memory-partition"));
    }

    #[test]
    fn options_typed_again_are_the_same() {
        let line = "--gpu-memory-layout two-tier --gpu-memory-partition 64MiB --gpu-memory-blocks 2MiB,10MiB";
        for line in ["", line, "--gpu-memory-buddy 4MiB"] {
            let first = parsed(line).unwrap();
            let again = parsed(&first.words().join(" ")).unwrap();
            assert_eq!(format!("{first:?}"), format!("{again:?}"));
        }
    }
}
