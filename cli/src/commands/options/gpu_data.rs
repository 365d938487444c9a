//! How GPUs keep intermediate data.

use millrace_types::Bytes;
use millrace_worker::start::{DataConfig, MIGRATIONS, MigrationPolicy, POOLS, PoolPolicy};

use super::one_of;

/// What workflows hand from function to function, in the memory of GPUs.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct GpuData {
    /// The most of each GPU's memory that objects take, and a quarter of the GPU at most; 0 keeps them
    /// all in host memory.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    gpu_object_memory: Bytes,
    /// What of a GPU's memory stays allocated for objects: what functions are expected to need
    /// (elastic), all that was ever needed (gmlake), or what is in use (none).
    #[arg(long, value_name = "NAME", default_value_t, value_parser = one_of(POOLS))]
    object_pool: PoolPolicy,
    /// Which object leaves a GPU first where there is too little room.
    #[arg(long, value_name = "NAME", default_value_t, value_parser = one_of(MIGRATIONS))]
    object_migration: MigrationPolicy,
}

impl GpuData {
    pub(crate) fn config(&self) -> DataConfig {
        let Self { gpu_object_memory: memory, object_pool: pool, object_migration: migration } = *self;
        DataConfig { memory, pool, migration }
    }

    /// The same options, to be typed again.
    pub(super) fn words(&self) -> Vec<String> {
        let Self { gpu_object_memory, object_pool, object_migration } = self;
        let of = |flag: &str, value: String| [flag.to_owned(), value];
        [
            of("--gpu-object-memory", gpu_object_memory.get().to_string()),
            of("--object-pool", object_pool.to_string()),
            of("--object-migration", object_migration.to_string()),
        ]
        .concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::options;

    #[test]
    fn the_defaults_are_the_worker_s_and_options_typed_again_are_the_same() {
        let data = |words: &[&str]| options::<GpuData>(words).unwrap();
        assert_eq!(data(&[]).config(), DataConfig::default());
        let line = ["--gpu-object-memory", "0", "--object-pool", "none", "--object-migration", "lru"];
        let first = data(&line);
        let again = options::<GpuData>(first.words()).unwrap();
        assert_eq!((first.config(), first.config().memory), (again.config(), Bytes::ZERO));
        let refused = options::<GpuData>(["--object-pool", "caching"]).unwrap_err().to_string();
        assert!(refused.contains("elastic, gmlake, none"), "{refused}");
    }
}
