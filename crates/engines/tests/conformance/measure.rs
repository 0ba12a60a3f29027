//! Temporary.
use crate::saves::{revive, stage};
use crate::world::{boot, say, world};
use std::process::Command;

fn sh(s: &str) { println!("{s}: {:?}", Command::new("sh").arg("-c").arg(s).status().unwrap().code()); }

#[tokio::test(flavor = "multi_thread")]
async fn outside() {
    let Some(world) = world().await else { return };
    sh("ip netns add tpx && ip link add tpxa type veth peer name tpxb netns tpx && ip addr add 45.45.45.1/30 dev tpxa && ip link set tpxa up && ip netns exec tpx ip addr add 45.45.45.2/30 dev tpxb && ip netns exec tpx ip link set tpxb up && ip netns exec tpx ip route add default via 45.45.45.1");
    let mut server = Command::new("ip").args(["netns", "exec", "tpx", "python3", "-c", "
import socket,threading
s=socket.socket(); s.setsockopt(socket.SOL_SOCKET,socket.SO_REUSEADDR,1); s.bind(('45.45.45.2',9999)); s.listen(9)
def serve(c):
    c.sendall(b'hi\\n')
    try:
        while True:
            d=c.recv(100)
            print('server got', d, flush=True)
            if not d: break
            c.sendall(d)
    except Exception as e: print('server sees', repr(e), flush=True)
while True:
    c,_=s.accept(); threading.Thread(target=serve,args=(c,),daemon=True).start()
"]).spawn().unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    let c = "(exec 3<>/dev/tcp/45.45.45.2/9999; echo connected; cat <&3; echo cat ended $?; echo x >&3; echo write ended $?) > /root/out 2>&1 & until grep -q hi /root/out 2>/dev/null || [ $((n++)) -gt 200 ]; do sleep 0.02; done; cat /root/out";
    println!("before: {}", crate::world::shell(&guest, c).await.0);
    let save = stage();
    machine.save(save.path()).await.unwrap();
    println!("original after live save: {}", say(&guest, "sleep 0.5; cat /root/out").await);
    println!("again: {}", crate::world::shell(&guest, c).await.0);
    machine.pause().await.unwrap();
    let save2 = stage();
    machine.save(save2.path()).await.unwrap();
    machine.kill().await.unwrap();
    let (machine, guest) = revive(&world, &plan, save2.path()).await;
    println!("revived: {}", say(&guest, "sleep 0.5; cat /root/out").await);
    println!("new one: {}", crate::world::shell(&guest, c).await.0);
    machine.kill().await.unwrap();
    server.kill().unwrap(); server.wait().unwrap();
    sh("ip netns del tpx; ip link del tpxa");
}
