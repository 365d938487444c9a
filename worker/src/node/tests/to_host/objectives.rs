//! By when what goes to the host is wanted (D14).

use super::*;
use crate::request::Asker;

/// What goes to the host for whoever is wanted within so many milliseconds.
fn counts(transfers: u64, ms: Option<u64>) -> Counts {
    match ms {
        Some(_) => Counts { admitted: transfers, ..Counts::default() },
        None => Counts { unpromised: transfers, ..Counts::default() },
    }
}

/// D14: what makes room is wanted when whoever gets it is.
#[test]
fn what_makes_room_for_an_answer_is_wanted_when_that_is() {
    for ms in [Some(200), None] {
        in_virtual_time(async {
            let (functions, sharing) = (vec![(60, ms)], Sharing::FaasTube);
            let plan = Plan { memory: Bytes::mib(512), functions, sharing, ..Plan::of(&[]) };
            let world = plan.start().await;
            let (first, second) = (world.make(60).await, world.make(60).await);
            let third = world.make(60).await;
            assert!(on_host(&first) && !on_host(&second) && !on_host(&third));
            assert_eq!(world.snapshot().await.transfers.ended.from_gpu, counts(1, ms));
            drop((first, second, third));
            world.is_at_rest().await;
        });
    }
}

#[test]
fn what_makes_room_for_a_model_is_wanted_when_its_run_is() {
    for ms in [Some(200), None] {
        in_virtual_time(async {
            let (functions, sharing) = (vec![(60, None), (FILLS, ms)], Sharing::FaasTube);
            let plan = Plan { memory: Bytes::mib(512), functions, sharing, ..Plan::of(&[]) };
            let world = plan.start().await;
            let (first, second) = (world.make(60).await, world.make(60).await);
            drop(world.ask(FILLS).await.unwrap().unwrap());
            assert!(on_host(&first) && on_host(&second));
            assert_eq!(world.snapshot().await.transfers.ended.from_gpu, counts(2, ms));
            drop((first, second));
            world.is_at_rest().await;
        });
    }
}

/// Inputs that are joined, and what programs read: by the request's own objective, or its function's. What
/// another worker fetches: by what that one says.
#[test]
fn what_is_read_outside_the_queue_is_wanted_when_the_answer_is() {
    in_virtual_time(async {
        let (functions, sharing) = (vec![(60, Some(200)), (59, None)], Sharing::FaasTube);
        let plan = Plan { memory: Bytes::mib(512), functions, sharing, ..Plan::of(&[]) };
        let world = plan.start().await;
        let object = world.make(60).await;
        let asker = |mib, ms: Option<u64>| {
            let objective = ms.map(Duration::from_millis);
            Arc::new(Asker { revision: key(mib), came: world.clock.now(), objective })
        };
        let of_function = [Reader::Inputs(asker(60, None)), Reader::Outside(asker(60, None))];
        let own = [Reader::Inputs(asker(59, Some(200))), Reader::Outside(asker(59, Some(200)))];
        let none = [Reader::Inputs(asker(59, None)), Reader::Outside(asker(59, None))];
        let elsewhere = [Reader::Elsewhere(world.clock.now() + Duration::from_secs(2)), Reader::Nobody];
        for reader in [of_function, own, none, elsewhere].into_iter().flatten() {
            fetch_for(Arc::clone(&object), reader).await.unwrap().unwrap();
        }
        let counts = Counts { admitted: 5, unpromised: 3, ..Counts::default() };
        assert_eq!(world.snapshot().await.transfers.ended.from_gpu, counts);
        drop(object);
        world.is_at_rest().await;
    });
}
