fn main(){ let a:Vec<String>=std::env::args().collect(); let k=torpor_kernel::prepare_package(a[1].as_ref(), a[2].as_ref()).unwrap(); eprintln!("{k:?}"); 
let t=std::time::Instant::now(); let k=torpor_kernel::newest(a[2].as_ref()).unwrap(); eprintln!("{:?}", t.elapsed()); std::fs::write("/tmp/kwork/initrd", torpor_kernel::initramfs(&k,&std::fs::read(&a[3]).unwrap()).unwrap()).unwrap(); }
