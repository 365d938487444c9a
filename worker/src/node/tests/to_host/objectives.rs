//! Tests of the deadlines of transfers to the host (D14).

use super::*;
use crate::object_handle::TransferRequester;

/// Returns the counts of transfers with a deadline in `ms` milliseconds, or without a deadline.
fn counts(transfers: u64, ms: Option<u64>) -> GuaranteeCounts {
    match ms {
        Some(_) => GuaranteeCounts { admitted: transfers, ..GuaranteeCounts::default() },
        None => GuaranteeCounts { unpromised: transfers, ..GuaranteeCounts::default() },
    }
}

/// D14: a migration has the deadline of the request that gets its memory.
#[test]
fn a_migration_for_an_answer_has_the_answers_deadline() {
    for ms in [Some(200), None] {
        in_virtual_time(async {
            let functions = vec![(60, ms)];
            let sharing = TransferSharing::FaasTube;
            let plan = Plan { memory: Bytes::mib(512), functions, sharing, ..Plan::of(&[]) };
            let world = plan.start().await;
            let first = world.make(60).await;
            let second = world.make(60).await;
            let third = world.make(60).await;
            assert!(on_host(&first) && !on_host(&second) && !on_host(&third));
            assert_eq!(world.snapshot().await.transfers.ended.from_gpu, counts(1, ms));
            drop((first, second, third));
            world.is_at_rest().await;
        });
    }
}

#[test]
fn a_migration_for_a_model_has_the_deadline_of_the_models_run() {
    for ms in [Some(200), None] {
        in_virtual_time(async {
            let functions = vec![(60, None), (FILLS, ms)];
            let sharing = TransferSharing::FaasTube;
            let plan = Plan { memory: Bytes::mib(512), functions, sharing, ..Plan::of(&[]) };
            let world = plan.start().await;
            let first = world.make(60).await;
            let second = world.make(60).await;
            drop(world.ask(FILLS).await.unwrap().unwrap());
            assert!(on_host(&first) && on_host(&second));
            assert_eq!(world.snapshot().await.transfers.ended.from_gpu, counts(2, ms));
            drop((first, second));
            world.is_at_rest().await;
        });
    }
}

/// Batched inputs and inputs of programs have the deadline of their request, or of its function. A
/// fetch by another worker has the deadline that this worker states.
#[test]
fn objects_read_outside_the_queue_have_their_readers_deadline() {
    in_virtual_time(async {
        let functions = vec![(60, Some(200)), (59, None)];
        let sharing = TransferSharing::FaasTube;
        let plan = Plan { memory: Bytes::mib(512), functions, sharing, ..Plan::of(&[]) };
        let world = plan.start().await;
        let object = world.make(60).await;
        let asker = |mib, ms: Option<u64>| {
            let objective = ms.map(Duration::from_millis);
            Arc::new(TransferRequester { revision: key(mib), came: world.clock.now(), objective })
        };
        let of_function = [TransferReader::Inputs(asker(60, None)), TransferReader::Outside(asker(60, None))];
        let own =
            [TransferReader::Inputs(asker(59, Some(200))), TransferReader::Outside(asker(59, Some(200)))];
        let none = [TransferReader::Inputs(asker(59, None)), TransferReader::Outside(asker(59, None))];
        let elsewhere =
            [TransferReader::Elsewhere(world.clock.now() + Duration::from_secs(2)), TransferReader::None];
        for reader in [of_function, own, none, elsewhere].into_iter().flatten() {
            fetch_for(Arc::clone(&object), reader).await.unwrap().unwrap();
        }
        let counts = GuaranteeCounts { admitted: 5, unpromised: 3, ..GuaranteeCounts::default() };
        assert_eq!(world.snapshot().await.transfers.ended.from_gpu, counts);
        drop(object);
        world.is_at_rest().await;
    });
}
