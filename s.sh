spcl() { python3 /tmp/chk/log.py "$@"; }






emnist() {     # FOLDER and further options
  spcl grid --benchmark ps-emnist --protocol ps-emnist.json --fit --data-dir data --scenarios task,class --configs 0-8 \
    --device cpu --jobs 4 --set threads=1 --set record_every=25 --no-model --out $1 "${@:2}"
}
cifar() {      # FOLDER and further options
  spcl grid --benchmark ps-cifar100 --data-dir data --scenarios task,class --device cuda --jobs 4 --set precision=bfloat16 \
    --set record_every=5 --set threads=1 --no-model --out $1 "${@:2}"
}
M="--methods all,torchjd:AlignedMTL,torchjd:Sum"; P="--protocol ps-cifar100.json --configs 0-8"
V="--set validation=0.2"; C="--scenarios class"

emnist ps-emnist --preset paper $M --seeds 0-2
emnist ps-emnist-released --preset released $M --seeds 0
emnist ps-emnist-held-out --preset paper $V --seeds 0-2 --methods soro --sweep method.scale=unit,min
emnist ps-emnist-held-out --preset paper $V --seeds 0-2 --methods soro+dbt --sweep method.alpha=1e-6,1e-5,1e-4,1e-3
emnist ps-emnist-betas --preset paper --seeds 0-2 --methods procrustes,torchjd:AlignedMTL --set 'optimizer.betas=[0.9,0.9]'
emnist ps-emnist-recipes --preset paper --seeds 0 --methods er,mgda,emgd,soro,spcl --sweep method.replay_loss=labels,logits
O="--methods mgda,soro --configs 0-1 --seeds 0"
for change in paper=threads=1 weigh-heads=method.weigh_heads=true normalise=normalise=false init=backbone.init=glorot \
    head-init=method.head_init=glorot eps=optimizer.eps=1e-7 memory=memory=epochs; do
  emnist ps-emnist-one-change/${change%%=*} --preset paper $O --set ${change#*=}
done
emnist ps-emnist-one-change/heads-and-inputs --preset paper $O --set method.weigh_heads=true --set normalise=false
emnist ps-emnist-one-change/released --preset released $O
for sweep in spcl:logit_weight=0.05,0.15,0.5,1.5,5 spcl:kappa=1,2,6,20 soro:sigma=10,30,100,300,1000 \
    soro:lambda_=10,30,100,300,1000 der++:logit_weight=0.01,0.03,0.1,0.3,1 der++:label_weight=0.05,0.15,0.5,1.5,5; do
  emnist ps-emnist-sensitivity --preset paper --configs 0,4,8 --seeds 0 --methods ${sweep%%:*} --sweep method.${sweep#*:}
done

cifar ps-cifar100 $P --preset paper $M --seeds 0-2
cifar ps-cifar100-released $P --preset released $M --seeds 0      # MDMTR ended with an error
cifar ps-cifar100-default $P --preset default --methods er,der++,soro,spcl --seeds 0-2
cifar ps-cifar100-twenty --configs 0-8 --preset paper --set tasks=20 --seeds 0 \
    --methods mgda,er,der++,emgd,soro,soro+dbt,spcl,torchjd:AlignedMTL
cifar ps-cifar100-penalty $P --preset paper --methods soro+dbt --seeds 0 \
    --sweep method.decoupled=false,true --sweep method.layers=all,convolutions
for change in paper=threads=1 weigh-heads=method.weigh_heads=true normalise=normalise=false \
    residual-relu=backbone.residual_relu=true norm-eps=backbone.norm_eps=1e-3 stem-init=backbone.stem_init=glorot \
    head-init=method.head_init=glorot eps=optimizer.eps=1e-7 memory=memory=epochs; do
  cifar ps-cifar100-one-change/${change%%=*} $P --preset paper --methods er,soro --configs 0-1 --seeds 0 --set ${change#*=}
done
F="$P --configs 0 --seeds 0-2 --preset paper --scenarios task"
for sweep in alpha=0,1e-6,1e-5,1e-4,1e-3,1e-2,1e-1 sigma=1,10,50,100,200,1000 lambda_=0,1,10,100,1000 iterations=0; do
  cifar ps-cifar100-hyperparameters $F --methods soro+dbt --sweep method.$sweep
done
cifar ps-cifar100-rehearsal $F --methods soro,soro+dbt --sweep memory_budget=500,1000,2000,3000,4000,5000
H="$P --preset paper --fit $V --seeds 0"
cifar ps-cifar100-held-out $H --methods soro
cifar ps-cifar100-held-out $H --methods soro+dbt --sweep method.alpha=1e-6,1e-5,1e-4,1e-3
cifar ps-cifar100-search-nine/labels $H --methods spcl --set method.replay_loss=labels
cifar ps-cifar100-search-nine/logits $H --methods spcl --sweep method.logit_weight=0.2,0.5,1
cifar ps-cifar100-search-nine/rivals $H --methods er,der++,soro,mgda,emgd

spcl grid --benchmark ps-tiny-imagenet --preset paper --protocol ps-tiny-imagenet.json --data-dir data --jobs 12 \
    --methods er,der++,mgda,dwa,rlw,pcgrad,graddrop,normsum,emgd,soro,soro+dbt,spcl,torchjd:AlignedMTL \
    --scenarios task,class --configs 0-8 --seeds 0 --device cuda --set precision=bfloat16 --set record_every=5 \
    --set threads=1 --no-model --out ps-tiny-imagenet

# the search for the defaults of spcl: SERIES and further options
A="--methods spcl --set method.replay_loss=labels"; L="--methods spcl --set method.replay_loss=logits"
search() { cifar ps-cifar100-search/$1 $H --configs 0,4,8 "${@:2}"; }
search rivals --methods er,soro,mgda,emgd
search labels $A --sweep method.kappa=1,3,1000 --sweep method.memory_share=null,0.5
search kappa $A --sweep method.kappa=1.2,1.5,2
search logits $L --sweep method.logit_weight=0.2,0.5,1
search uncond --methods procrustes,soro-kappa,normsum
search() { emnist ps-emnist-search/$1 --preset paper $V --configs 0,4,8 --seeds 0 "${@:2}"; }
search rivals --methods er,der++,soro,mgda,emgd
search labels $A --sweep method.kappa=1,3,1000 --sweep method.memory_share=null,0.5
search logits $L --sweep method.kappa=1,3,1000 --sweep method.logit_weight=0.5,2,8 --sweep method.memory_share=null,0.5
search scale $L --set method.kappa=1 --set method.logit_weight=2 --sweep method.scale=min,mean,norm,unit
search prediction $L $C --set method.kappa=1 --set method.logit_weight=2 --sweep predict_by=class-means,adjusted,balanced-heads
search weak $L --sweep method.logit_weight=0.1,0.2,0.35 --sweep method.memory_share=null,0.15

# the search for the preset plus: SERIES and further options; --set undoes what the preset has learned from it
S="--set method.memory_share=0.5"; W="--sweep method.logit_weight"
plus() {
  cifar ps-cifar100-plus-search/$1 $P --preset plus --fit $V --configs 0,4 --seeds 0 --methods spcl --set memory_batch=1024 \
    --set updates=3 --set learning_rate=0.001 --set method.memory_share=null --set method.logit_weight=0.2 "${@:2}"
}
plus average --sweep average=null,0.99,0.995 --sweep learning_rate=0.0004,0.001
plus heads-fast $C --set average=0.99 --sweep predict_by=head,balanced-heads
plus heads $C --set method.logit_weight=0.5 --sweep learning_rate=0.0004 --sweep predict_by=adjusted,balanced-heads
plus share --sweep method.memory_share=0.5,classes $W=0.2,0.5,1
plus updates --set method.logit_weight=0.5 --sweep updates=5,8 --sweep memory_batch=512,1024
plus combined $S --sweep updates=5,8 --sweep memory_batch=512,1024
plus combined-heads $S $C --set updates=5 --sweep predict_by=balanced-heads
plus eight-rate $S --set updates=8 --sweep learning_rate=0.0006,0.002
plus eight-weight $S --set updates=8 $W=0.05,0.1
plus eight-share --set updates=8 --sweep method.memory_share=0.7
plus() {
  emnist ps-emnist-plus-search/$1 --preset plus $V --configs 0,4,8 --seeds 0 --methods spcl --set record_every=10 \
    --set learning_rate=0.003 "${@:2}"
}
D="--set predict_by=class-means"; both() { plus $1 --scenarios task "${@:2}"; plus $1 $C $D "${@:2}"; }
N="--set memory_batch=1024"; F="--set learning_rate=0.001"; R="--sweep learning_rate=0.001,0.003"
plus weight $N --set average=0.99 --set record_every=25 --scenarios task $W=0.2,1,2
plus weight $N --set average=0.99 --set record_every=25 $C $W=0.2,1,2 --sweep predict_by=class-means,head,balanced-heads
both share $N --sweep method.memory_share=0.5,classes $W=0.5,1,2
plus heads $N $C $S $W=0.5,1,2 --sweep predict_by=head,balanced-heads
plus long $N $C $W=1 --sweep average=0.998,0.999 --sweep predict_by=class-means,head
both updates $W=1 --sweep updates=1,5 --sweep memory_batch=256,1024
both crop $N $W=1 --set 'augment=[crop]'
both rate $N $W=1 --sweep learning_rate=0.0005,0.002
plus one --set updates=1 $R $W=0.5,1
plus one-strong --set updates=1 $R $W=2
plus one-half --set memory_batch=512 $S --set updates=1 $R $W=2
plus one-means $C $D --set updates=1 $R $W=1,2
plus three $F $W=0.5,2
plus slow $F $W=4
plus middle $W=1,1.5
plus strong $W=4,8
plus three-rate $W=2 --sweep learning_rate=0.002,0.003
plus adjusted $C $W=2 --sweep predict_by=adjusted,balanced-heads
plus rivals $C $F --methods er,mgda,soro --sweep predict_by=head,class-means
plus rivals-logits $F --methods der++ $W=0.1,0.5,2
plus rivals-means $C $D $F --methods der++ $W=0.1,2

emnist ps-emnist-plus --preset plus --seeds 0-2 --methods er,der++,mgda,soro,spcl
emnist ps-emnist-plus --preset plus --seeds 0-2 --methods er,der++,mgda,soro $C --sweep predict_by=class-means
X="ps-emnist-plus-ablation --preset plus --seeds 0 --methods spcl --configs 0,4,8"
emnist $X
for sweep in average=null method.replay_loss=labels method.kappa=1000 updates=1 method.logit_weight=0.5; do
  emnist $X --sweep $sweep
done
emnist $X $C --sweep predict_by=class-means,balanced-heads

toy() {        # FOLDER and further options
  spcl grid --benchmark toy-cifar10 --data-dir data --scenarios task --device cpu --set threads=1 --no-model --out $1 "${@:2}"
}
toy toy-cifar10 --seeds 0 --methods er,soro+dbt --set evaluate_every=10
toy toy-cifar10-ablation --seeds 0-2 --methods er,soro --set evaluate_every=10 --sweep method.alpha=0,1e-5
toy toy-cifar10-timelines --seeds 0 --methods soro+dbt --configs 0-2 --sweep overlap=1,0.5







